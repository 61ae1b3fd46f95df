"""Fine-tunes a stock causal language model by the method of MARS, so that it predicts several tokens a step.

Each forward reads a text and windows of masks over its answers. Ctrl-C stops; the same command continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take cores from those with work

import torch
import torch.nn.functional as F
from measure import score
from model import (
    Base,
    Batch,
    choose_mask,
    forward,
    grid,
    is_recurrent,
    load,
    open_base,
    save,
    set_attention,
    with_lora,
)
from peft import PeftModel
from rows import Row, Sequence, encode_all, read
from torch import Tensor

from mars_export.runtime.errors import MarsError
from mars_export.runtime.machine import cpu_flags
from mars_export.runtime.terminal.console import advance, print_table, progress_bars, say, uninterrupted

ROW_WINDOWS = 4  # of a sequence, if each takes a row: those of a long answer would be many
FREE = ("out", "hours", "epochs", "checkpointing", "threads")  # may change when a run continues


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--base", help="stock model or LoRA, directory or hub id (default: SmolLM2-135M-Instruct)")
    add("--rows", type=Path, help="JSONL rows with answers, which the model learns")
    add("--keep", type=Path, help="JSONL rows on which it stays the base model, which answers them if needed")
    add("--held-out", type=Path, help="JSONL rows with answers for the table (default: a tenth of --rows)")
    add("--out", type=Path, required=True, help="directory of the result")
    add("--full", action="store_true", help="train all weights instead of a LoRA")
    add("--rank", type=int, default=32, help="of the LoRA (default %(default)s)")
    add("--block", type=int, default=8, help="predictions of a forward (default %(default)s)")
    add("--hours", type=float, help="end after this time of training")
    add("--epochs", type=float, help="end after these passes over the rows (default 3, with --hours none)")
    add("--batch", type=int, help="answers of a forward (default 2; 8 on a GPU)")
    add("--accumulate", type=int, default=1, help="forwards of an update (default %(default)s)")
    add("--checkpointing", action="store_true", help="compute activations twice instead of storing them")
    add("--lr", type=float, help="learning rate (default 5e-4; 1e-5 with --full)")
    add("--max-length", type=int, default=2048, help="most tokens of a context and answer")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 if the processor computes in it")
    add("--threads", type=int, help="CPU threads (default: a thread a core)")
    add("--seed", type=int, default=0)
    add("--one-token", action="store_true", help="ordinary fine-tuning without masks, to compare with")
    args = parser.parse_args(arguments)
    if not (args.rows or args.keep) or args.block < 2:
        parser.error("give --rows or --keep, and --block >= 2")
    gpu = torch.cuda.is_available()
    args.batch = args.batch or (8 if gpu else 2)
    has_bf16 = gpu or cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}
    args.dtype = args.dtype or ("bfloat16" if has_bf16 else "float32")
    args.lr = args.lr or (1e-5 if args.full else 5e-4)
    args.epochs, args.hours = args.epochs or (math.inf if args.hours else 3), args.hours or math.inf
    return args


def complete(rows: list[Row], base: Base, model: Any, path: Path) -> list[Row]:
    """The rows, with greedy answers of the base model to those without one. `path` stores the answers."""
    done = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
    with progress_bars() as bars:
        report = advance(bars)
        for number, row in enumerate(rows):
            if row.is_answered:
                continue
            text, is_text = row.context(base.tokenizer, len(row.turns)), isinstance(row.task.source, str)
            if text not in done:
                ids = base.tokenizer(text, add_special_tokens=is_text, return_tensors="pt").to(model.device)
                out = model.generate(**ids, max_new_tokens=row.task.max_new_tokens, do_sample=False)
                done[text] = base.tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
                with path.open("a") as sink:
                    sink.write(json.dumps([text, done[text]]) + "\n")
            rows[number] = replace(row, task=replace(row.task, answer=done[text]))
            report("answers of the base: row", number + 1, len(rows))
    return rows


def batches(
    sequences: list[Sequence], args: argparse.Namespace, step: int, windows: int | None
) -> Iterator[Batch]:
    """Endless batches of sequences and their windows from a step on, in another order in each epoch and
    on another grid each time. `windows`: the most of a sequence, chosen at random; None for all."""
    size, width = args.batch, args.block - 1
    while True:
        epoch, place = divmod(step, math.ceil(len(sequences) / size))
        order = random.Random(f"{args.seed}:{epoch}").sample(sequences, len(sequences))
        draw = random.Random(f"{args.seed}:{step}:grid")
        chosen = order[place * size : (place + 1) * size]
        grids = [[] if args.one_token else grid(s, width, draw.randrange(width)) for s in chosen]
        if windows is not None:
            grids = [draw.sample(spans, min(windows, len(spans))) for spans in grids]
        yield list(zip(chosen, grids, strict=True))
        step += 1


def losses(model: Any, batch: Batch, mask_id: int) -> tuple[Tensor, Tensor]:
    """Mean losses of the clean outputs and of the masks. With a LoRA, clean outputs of kept sequences learn
    the probabilities of the base model instead of a text."""
    pack, logits = forward(model, batch, mask_id)
    each = F.cross_entropy(logits, pack.targets, reduction="none")
    kept: Batch = [(sequence, []) for sequence, _ in batch if sequence.kept]
    if kept and isinstance(model, PeftModel):
        taught = pack.kept & ~pack.noisy
        with torch.no_grad(), model.disable_adapter():
            expected = forward(model, kept, mask_id)[1].log_softmax(-1)
        apart = F.kl_div(logits[taught].log_softmax(-1), expected, reduction="none", log_target=True)
        each = each.masked_scatter(taught, apart.sum(-1))
    return each[~pack.noisy].mean(), each[pack.noisy].sum() / max(1, int(pack.noisy.sum()))


class Run:
    """The optimizer over fp32 copies of the trained weights, and what to remember between restarts."""

    def __init__(self, model: Any, args: argparse.Namespace, settings: str) -> None:
        self.args, self.path = args, args.out / "training.pt"
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.live = [p for _, p in named]
        self.copies = [p.detach().float().clone() for p in self.live]
        rates = [3 if "trainable_tokens" in name else 1 for name, _ in named]  # 3: the mask's row
        groups = [{"params": [p], "rate": rate} for p, rate in zip(self.copies, rates, strict=True)]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        self.state: dict[str, Any] = {"settings": settings, "step": 0, "seconds": 0.0}
        if self.path.exists():
            stored = torch.load(self.path, weights_only=True)
            if stored["settings"] != settings:
                raise SystemExit(
                    f"{self.path} has other rows or settings; use the same ones, or another --out"
                )
            self.optimizer.load_state_dict(stored.pop("optimizer"))
            self.publish(stored.pop("weights"))
            self.state = stored

    def publish(self, weights: list[Tensor]) -> None:
        for live, kept, values in zip(self.live, self.copies, weights, strict=True):
            kept.copy_(values)
            live.data.copy_(values)

    def save(self) -> None:
        state = {**self.state, "weights": self.copies, "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)

    def update(self, progress: float) -> None:
        """The rate rises for 15 steps and falls along a cosine to 3 % of its peak."""
        fall = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * group["rate"] * fall * min(1.0, (self.state["step"] + 1) / 15)
        for live, kept in zip(self.live, self.copies, strict=True):
            kept.grad, live.grad = live.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.optimizer.step()
        self.publish(self.copies)
        self.state["step"] += 1


def train(run: Run, model: Any, sequences: list[Sequence], mask_id: int) -> None:
    """Trains until the schedule ends. Ctrl-C stops after the current update, and exits."""
    args, state = run.args, run.state
    steps = math.ceil(len(sequences) / args.batch) * args.epochs / args.accumulate
    windows = ROW_WINDOWS if is_recurrent(model) else None

    def progress() -> float:
        return max(state["step"] / steps, state["seconds"] / 3600 / args.hours)

    stream = batches(sequences, args, state["step"] * args.accumulate, windows)
    model.train()
    saved = time.monotonic()
    try:
        with progress_bars() as bars:
            report = advance(bars)
            while (part := progress()) < 1:
                with uninterrupted():
                    begun = time.monotonic()
                    for _ in range(args.accumulate):
                        clean, noisy = losses(model, next(stream), mask_id)
                        ((clean + noisy) / args.accumulate).backward()
                    run.update(part)
                    state["seconds"] += time.monotonic() - begun
                note = f"loss {clean:.3f}, of masks {noisy:.3f}"
                report("training step", state["step"], round(state["step"] / progress()), note)
                if time.monotonic() - saved > 300:
                    run.save()
                    saved = time.monotonic()
    except KeyboardInterrupt:
        raise SystemExit(f"stopped after step {state['step']}; the same command continues") from None
    finally:
        run.save()


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    try:
        rows, kept, held = read(args.rows), read(args.keep, kept=True), read(args.held_out)
        base = open_base(args.base)
    except MarsError as error:
        raise SystemExit(str(error)) from error
    if not held:
        random.Random(args.seed).shuffle(rows)
        held, rows = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    used = {token for s in encode_all([*rows, *kept, *held], base, args.max_length) for token in s.tokens}
    is_new = base.tokenizer.mask_token is None
    mask_id, chosen = choose_mask(base, used)
    say(chosen)
    model = load(base, mask_id, is_new, getattr(torch, args.dtype))
    args.out.mkdir(parents=True, exist_ok=True)
    kept = complete(kept, base, model, args.out / "answers.jsonl")
    sequences, tests = (encode_all(part, base, args.max_length) for part in (rows + kept, held))
    (args.out / "held-out.jsonl").write_text("".join(row.line() for row in held), encoding="utf-8")
    set_attention(model)
    of_base = score(model, tests, mask_id, 0) if tests else {}
    model = model if args.full else with_lora(model, base, mask_id, args.rank)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fixed = [(name, value) for name, value in vars(args).items() if name not in FREE]
    run = Run(model, args, hashlib.sha256(repr((fixed, sequences)).encode()).hexdigest())
    trained = sum(p.numel() for p in run.copies) / 1e6
    say(f"{len(sequences)} answers, {len(tests)} held out, {trained:.1f}M weights, {args.dtype}")
    train(run, model, sequences, mask_id)
    ours = score(model, tests, mask_id, 0 if args.one_token else args.block - 1) if tests else {}
    cells = [(name, f"{of_base[name]:.2f}", f"{value:.2f}") for name, value in ours.items()]
    print_table((f"{len(tests)} held-out answers", "base", "fine-tuned"), cells, of_numbers=True)
    save(model, base, args.out, None if args.one_token else args.block)
    say(f"{run.state['step']} steps in {run.state['seconds']:.0f} s; next:")
    say(f"mars-export onnx {args.out} -o {args.out.name}.bundle")


if __name__ == "__main__":
    main()
