"""Exports random bf16 checkpoints of 1.5B and 7B shape: wall time, MB/s of input and peak anonymous memory.

The self-check is included.

    # 1.5B (3 GB) and 7B (15 GB, needs 50 GB of disk)
    python benchmarks/export.py
    # a look-alike of the MARS authors' 0.5B (three shards of bf16), in each precision; then without
    # transformers' second opinion, which loads the whole model in fp32 where memory allows it
    python benchmarks/export.py --shapes 0.5B --precisions fp32 fp16 bf16 int8 int4 w8a8
    python benchmarks/export.py --shapes 0.5B --precisions fp32 fp16 bf16 int8 int4 w8a8 --no-oracle
    # and the peers' exporters on the same checkpoint
    python benchmarks/export.py --shapes 1.5B --venvs build/peers/venvs

The peers' environments are those that `benchmarks/peers.py --setup genai` makes; TensorRT Edge-LLM's is `pip
install tensorrt-edgellm` in VENVS/edgellm. Checkpoints stay in --work; exported bundles are deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_checkpoint
import watched
from peers import machine

ROOT = Path(__file__).resolve().parent
GOALS = {"1.5B": 1.5e9, "7B": 3e9}  # most anonymous bytes
GOAL_SPEED = 100.0  # MB of input a second


@dataclass(frozen=True, slots=True)
class Job:
    """One export. `{out}` in the command is where to write; `absent` says why it cannot run."""

    name: str
    shape: str
    command: tuple[str, ...]
    ours: bool
    absent: str | None = None


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    cli = (sys.executable, "-c", "from mars_export.cli import main; main()", "onnx")
    oracle = ("--no-oracle",) if args.no_oracle else ()
    for shape in args.shapes:
        model = str(args.work / shape)
        for precision in args.precisions:
            # Weights without meaning drift as they like; the check runs all the same, as users get it.
            yield Job(
                f"mars-export {precision}",
                shape,
                (*cli, model, "-o", "{out}", "--precision", precision, "--allow-drift", *oracle),
                True,
            )
        if args.venvs is not None and shape in args.peer_shapes:
            yield from _peers(args, shape, model)


def _peers(args: argparse.Namespace, shape: str, model: str) -> Iterator[Job]:
    genai = args.venvs / "genai" / "bin" / "python"
    absent = None if genai.exists() else f"no {genai}; python benchmarks/peers.py --setup genai"
    for precision, provider in (("fp16", "cuda"), ("int4", "cpu")):  # its builder writes fp16 for GPUs only
        words = (
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            model,
            "-o",
            "{out}",
            "-p",
            precision,
            "-e",
            provider,
            "-c",
            "{out}-cache",
        )
        yield Job(f"onnxruntime-genai {precision}", shape, (str(genai), *words), False, absent)
    edge = args.venvs / "edgellm" / "bin" / "tensorrt-edgellm-export"
    absent = (
        None if edge.exists() else f"no {edge}; python -m venv VENV && VENV/bin/pip install tensorrt-edgellm"
    )
    yield Job("TensorRT Edge-LLM fp16", shape, (str(edge), model, "{out}", "--dtype", "fp16"), False, absent)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def run(job: Job, work: Path, threads: int) -> dict[str, Any]:
    """What the export took. Its output is deleted."""
    if job.absent is not None:
        return {"name": job.name, "shape": job.shape, "absent": job.absent}
    out, log = work / "exported", work / f"{job.name} {job.shape}.log"
    for path in (out, work / "exported-cache"):
        shutil.rmtree(path, ignore_errors=True)
    given = sum(path.stat().st_size for path in (work / job.shape).glob("*.safetensors"))
    settings = {"OMP_NUM_THREADS": str(threads), "ORT_DISABLE_TELEMETRY": "1"}
    try:
        seen = watched.watch([part.format(out=out) for part in job.command], log, settings)
        made = size_of(out) if out.exists() else 0
    finally:
        for path in (out, work / "exported-cache"):
            shutil.rmtree(path, ignore_errors=True)
    result = {
        "name": job.name,
        "shape": job.shape,
        "input_bytes": given,
        "output_bytes": made,
        **seen.to_dict(),
    }
    result["input_mb_per_second"] = given / 1e6 / seen.seconds
    result["input_mb_per_cpu_second"] = given / 1e6 / seen.cpu_seconds if seen.cpu_seconds else None
    if seen.exit_code or not made:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        result["failed"] = lines[-1] if lines else "no output"
    elif job.ours and job.shape in GOALS:
        result["memory_goal_met"] = seen.peak_anonymous <= GOALS[job.shape]
        result["speed_goal_met"] = result["input_mb_per_second"] >= GOAL_SPEED
    return result


def line(result: dict[str, Any]) -> str:
    head = f"{result['name']:26} {result['shape']:>5}"
    if "absent" in result:
        return f"{head}  absent: {result['absent']}"
    text = (
        f"{head}  {result['seconds']:7.1f} s wall  {result['cpu_seconds']:7.1f} s CPU"
        f"  {result['input_mb_per_second']:6.0f} MB/s of input  {result['peak_anonymous'] / 1e9:6.2f} GB"
        f" anonymous  {result['output_bytes'] / 1e9:6.2f} GB written"
    )
    return f"{text}  FAILED: {result['failed']}" if "failed" in result else text


def save(path: Path, about: dict[str, Any], results: list[dict[str, Any]], places: dict[str, str]) -> None:
    """`places`: directories of this machine, by the word that stands for each in what is saved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    text = json.dumps({"about": about, "exports": results}, indent=1)
    for word, place in places.items():
        text = text.replace(place, word)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/export"), help="checkpoints and logs")
    parser.add_argument("--shapes", nargs="+", choices=list(random_checkpoint.SHAPES), default=["1.5B", "7B"])
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=("fp32", "fp16", "bf16", "int8", "int4", "w8a8"),
        default=["fp16", "int4"],
    )
    parser.add_argument(
        "--venvs", type=Path, help="environments of the peers' exporters; without it they are left out"
    )
    parser.add_argument(
        "--peer-shapes",
        nargs="+",
        choices=list(random_checkpoint.SHAPES),
        default=["1.5B"],
        help="what the peers export",
    )
    parser.add_argument(
        "--no-oracle",
        action="store_true",
        help="without transformers' second opinion: its fp32 model is memory",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "export.json")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error("--threads must be positive")
    args.work = args.work.absolute()
    args.venvs = args.venvs.absolute() if args.venvs else None
    args.work.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": machine.describe(args.threads),
        "poll_seconds": watched.POLL_SECONDS,
        "memory_goals": GOALS,
        "speed_goal": GOAL_SPEED,
    }
    results: list[dict[str, Any]] = []
    places = {"WORK": str(args.work)} | ({"VENVS": str(args.venvs)} if args.venvs else {})
    try:
        for job in jobs(args):
            checkpoint = args.work / job.shape
            if not checkpoint.exists():
                make_checkpoint(checkpoint, random_checkpoint.SHAPES[job.shape])
            results.append(run(job, args.work, args.threads))
            print(line(results[-1]), flush=True)
            save(args.json, about, results, places)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {args.json}", file=sys.stderr)
        sys.exit(130)


def make_checkpoint(target: Path, shape: random_checkpoint.Shape) -> None:
    """Write the checkpoint if it and an export of it fit on the disk."""
    linear = (
        shape.num_hidden_layers * shape.hidden_size * (3 * shape.intermediate_size + 2 * shape.hidden_size)
    )
    needed = 2 * 2 * (linear + (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size)
    free = shutil.disk_usage(target.parent).free
    if free < 1.3 * needed:
        sys.exit(
            f"error: {target.parent} has {free / 1e9:.0f} GB free, about {1.3 * needed / 1e9:.0f} GB are"
            " needed; give another --work"
        )
    print(f"writing {target.name}", file=sys.stderr, flush=True)
    random_checkpoint.write_checkpoint(target, shape)


if __name__ == "__main__":
    main()
