"""What a draft adapter adds to a step: a stock model beside the same model with random adapters.

    python benchmarks/step_drafts.py CHECKPOINT

One row at cursor 128: one token, 8 tokens, one token and 7 draft slots. Medians in milliseconds, and the
factor over the stock model. Bundles stay in --work.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mars_export import Session
from mars_export.exporter.checkpoint.drafts import products
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.decode.pace.draft import DraftSlots
from steps import CURSOR, Times, Work, one_round

KNOWN = 5  # a token id
STOCK = "stock"


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by precision, adapter and feed."""
    result: dict[str, Any] = {}
    for precision in args.precisions:
        sessions = {
            name: Session.open(_bundle(args, precision, rank), threads=args.threads, cache_bytes=0)
            for name, rank in [(STOCK, 0), *((f"rank {rank}", rank) for rank in args.ranks)]
        }
        works = {
            (name, feed): _step(session, ids)
            for name, session in sessions.items()
            for feed, ids in _feeds(session).items()
        }
        times = {key: Times() for key in works}
        for _ in range(args.rounds):
            one_round(works, times, lambda _: 3)
        for name, session in sessions.items():
            ran = {feed: times[name, feed].summary() for feed in _feeds(session)}
            stock = {feed: times[STOCK, feed].summary()["median"] for feed in ran}
            cells = (
                f"{feed}: {t['median']:.1f} ({t['median'] / stock[feed]:.2f})" for feed, t in ran.items()
            )
            print(f"{precision:5} {name:9}", "  ".join(cells), flush=True)
            result.setdefault(precision, {})[name] = ran
    return result


def _step(session: Session, tokens: list[int]) -> Work:
    cache, count = session.backend.new_cache(1), len(tokens)
    cache.reserve(CURSOR + count)
    ids, index = np.array([tokens]), np.arange(count)[None]
    return lambda: session.backend.step(cache, 0, ids, np.array([CURSOR]), index, False)


def _feeds(session: Session) -> dict[str, list[int]]:
    """The token ids of a step by its name. A stock model's draft slots are tokens."""
    info, size = session.bundle.manifest.draft, session.bundle.manifest.model.vocab_size
    slots = DraftSlots.of(0, size, info.low, info.high).ids(CURSOR + 1, 7) if info else [KNOWN] * 7
    return {"1 token": [KNOWN], "8 tokens": [KNOWN] * 8, "1 token, 7 drafts": [KNOWN, *slots]}


def _bundle(args: argparse.Namespace, precision: str, rank: int) -> Path:
    """A bundle of the checkpoint with an adapter of that rank, or with none."""
    target: Path = args.work / f"{args.checkpoint.name}-{precision}-{rank}"
    if not target.exists():
        adapters = {"random": str(_adapter(args, rank))} if rank else None
        opened = open_checkpoint(
            str(args.checkpoint), masks=False, draft_adapters=adapters, draft_ids="noise"
        )
        quantizer = "auto" if precision == "fp32" else "round"
        options = ExportOptions(precision=precision, quantizer=quantizer, allow_drift=True, oracle=False)
        export_onnx(opened, target, options)
    return target


def _adapter(args: argparse.Namespace, rank: int) -> Path:
    """Random pairs for all Linear maps of layers."""
    directory: Path = args.work / f"{args.checkpoint.name}-adapter-{rank}"
    if not directory.exists():
        directory.mkdir(parents=True)
        opened, draw = open_checkpoint(str(args.checkpoint), masks=False), np.random.default_rng(rank)
        tensors = {}
        for weight in (weight for group in products(opened.dims).values() for weight in group):
            outputs, inputs = opened.tensors.shapes[weight]
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                name = f"base_model.model.{weight.removesuffix('weight')}lora_{part}.weight"
                tensors[name] = 0.02 * draw.standard_normal(shape, np.float32)
        save_file(tensors, directory / "adapter_model.safetensors")
        modules = sorted({name.split(".")[-3] for name in tensors})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        config |= {"base_model_name_or_path": args.checkpoint.name, "bias": "none"}
        (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a stock model's directory")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128], metavar="R")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "w8a8", "int4"], metavar="P")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--work", type=Path, default=Path("build/drafts"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = measured(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
