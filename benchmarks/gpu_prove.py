"""Runs everything that needs a GPU, and writes the results as a page.

    python benchmarks/gpu_prove.py                        all steps; what passed before is not run again
    python benchmarks/gpu_prove.py tests doctor-fp16      some of them
    python benchmarks/gpu_prove.py --list                 what there is; each takes at most ten minutes
    python3 benchmarks/gpu_prove.py --joined build/gpu-joined    what gpu_pack.py brought, no network

Each step is a process of its own. Its output is kept in build/gpu/STEP.log, its outcome in
build/gpu/STEP.json; the page is docs/gpu/GPU.md with the same figures as GPU.json beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu.table import table

ROOT = Path(__file__).resolve().parents[1]
BUILD, DOCS = ROOT / "build" / "gpu", ROOT / "docs" / "gpu"
LIMIT = 590  # seconds of a step
SKIPPED = 77  # exit code of a step that has nothing to look at here
PRECISIONS = ("fp32", "fp16", "int4", "int8")
SHAPES = ("0.5B", "1.5B", "7B")
CLI = (sys.executable, "-c", "from mars_export.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Step:
    """One process; `needs` is a path that must be there, `makes` one that is enough if it is."""

    title: str
    command: tuple[str, ...]
    needs: Path | None = None
    makes: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A step's outcome: passed, failed, or not run with the reason."""

    name: str
    title: str
    state: str
    detail: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


def steps(device: str, joined: Path | None = None) -> dict[str, Step]:
    """In an order in which each finds what it needs."""
    few = ("--rows", "2") if device == "cpu" else ()
    benchmarks = Path(__file__).parent
    here = benchmarks / "gpu"
    found = {
        "tests": Step(
            "tests that need a GPU",
            (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/runtime/device"),
        )
    }
    for precision in PRECISIONS:
        bundle = BUILD / f"{precision}.bundle"
        extra = ("--top-k", "16", *(("--logits",) if precision == "fp32" else ()))
        export = (
            *CLI,
            "onnx",
            "-o",
            str(bundle),
            "--precision",
            precision,
            "--no-reference",
            "--allow-drift",
            *extra,
        )
        found[f"export-{precision}"] = Step(f"the default checkpoint in {precision}", export, makes=bundle)
        doctor = (*CLI, "doctor", str(bundle), "--device", device)
        found[f"doctor-{precision}"] = Step(f"{precision}: where KV is, tokens, steps", doctor, needs=bundle)
        speed = (sys.executable, f"{here}/speed.py", str(bundle), "--device", device, *few)
        found[f"speed-{precision}"] = Step(f"{precision}: tokens a second", speed, needs=bundle)
        modes = (sys.executable, f"{benchmarks}/modes.py", str(bundle), "--device", device, *few)
        found[f"modes-{precision}"] = Step(f"{precision}: answers of three tasks", modes, needs=bundle)
    found["cpp"] = Step(
        "libmars on a GPU: ONNX Runtime's rows on the device, engines",
        (
            sys.executable,
            f"{here}/libmars.py",
            str(BUILD / "fp32.bundle"),
            *(("--joined", str(joined)) if joined else ()),
        ),
        needs=BUILD / "fp32.bundle",
    )
    for shape in SHAPES:
        bundle = BUILD / f"{shape}.bundle"
        make = (sys.executable, f"{here}/shape.py", shape, "-o", str(bundle))
        found[f"export-{shape}"] = Step(f"random weights of {shape} shape in fp16", make, makes=bundle)
        speed = (sys.executable, f"{here}/speed.py", str(bundle), "--device", device, *few)
        found[f"speed-{shape}"] = Step(f"{shape} shape: tokens a second", speed, needs=bundle)
    found["transformers"] = Step(
        "transformers' own one-token speed, fp16",
        (sys.executable, f"{here}/transformers_speed.py", "--device", device),
    )
    return found


def environment(joined: Path | None) -> dict[str, str]:
    """For the steps: our package by its name, and the wheels that were brought, first on the path."""
    link = ROOT / "build" / "typing" / "mars_export"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(ROOT)
    if find_spec("mars_export") is None:  # not installed: bundles name the version that wrote them
        found = re.search(r'^__version__ = "(.+)"$', (ROOT / "__init__.py").read_text("utf-8"), re.MULTILINE)
        assert found is not None
        info = link.parent / f"mars_export-{found[1]}.dist-info"
        info.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: mars-export\nVersion: {found[1]}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    paths = [str(link.parent), str(ROOT / "benchmarks"), str(ROOT / "tests")]
    values = dict(os.environ)
    if joined is not None:
        paths.insert(0, str(joined / "site"))
        values |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(joined / "base"), "HF_HUB_OFFLINE": "1"}
        values.setdefault("MARS_EXPORT_CACHE", str(BUILD / "cache"))
    values["PYTHONPATH"] = os.pathsep.join([*paths, values.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return values


def take(name: str, step: Step, env: Mapping[str, str]) -> Result:
    """Run one step with its time limit."""
    if step.makes is not None and step.makes.exists():
        return Result(name, step.title, "passed", "there already", 0.0)
    if step.needs is not None and not step.needs.exists():
        return Result(name, step.title, "not run", f"{step.needs.name} is not there", 0.0)
    log, began = BUILD / f"{name}.log", perf_counter()
    with log.open("w", encoding="utf-8") as out:
        try:
            code = subprocess.run(
                step.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**env, "PYTHONUNBUFFERED": "1"},  # words in the order in which they were said
                timeout=LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        except OSError as error:
            return Result(name, step.title, "not run", f"{step.command[0]}: {error.strerror}", 0.0)
    seconds = round(perf_counter() - began, 1)
    text = log.read_text(encoding="utf-8", errors="replace").strip().replace(f"{ROOT}/", "")
    last = text.splitlines()[-1] if text else ""
    if name == "tests" and re.search(r"\b\d+ skipped", last) and not re.search(r"\b\d+ passed", last):
        return Result(name, step.title, "not run", f"{last} (no GPU?)", seconds)
    if name == "cpp" and code == SKIPPED:
        return Result(name, step.title, "not run", last, seconds)
    figures = _figures(last)
    state = "passed" if code == 0 else "failed"
    return Result(name, step.title, state, last[:300] if code != 124 else f"over {LIMIT} s", seconds, figures)


def _figures(last: str) -> dict[str, Any]:
    """A last line of JSON."""
    try:
        found = json.loads(last)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def device_name(device: str) -> str:
    if device == "cpu":
        return "CPU (a rehearsal: no GPU)"
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def page(gpu: str, results: Sequence[Result]) -> str:
    """The page of one GPU: every step, then the speeds of all bundles."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [f"# {gpu}", "", f"Written by `python benchmarks/gpu_prove.py` on {date}.", ""]
    speeds = [row for r in results for row in r.figures.get("rows", [])]
    if speeds:
        lines += [*table(speeds), ""]
    lines += ["| step | | last words | seconds |", "|---|---|---|---|"]
    for r in results:
        state = {"passed": "passed", "failed": "**failed**"}.get(r.state, "not run here")
        detail = f"{len(r.figures['rows'])} rows above" if "rows" in r.figures else r.detail
        lines.append(f"| {r.name}: {r.title} | {state} | {_cell(detail)} | {r.seconds:g} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", help="names of steps; all by default")
    parser.add_argument("--list", action="store_true", help="name the steps")
    parser.add_argument("--joined", type=Path, help="what gpu_pack.py unpacked")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a rehearsal")
    parser.add_argument("--again", action="store_true", help="run what passed before, too")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page goes")
    args = parser.parse_args()
    known = steps(args.device, args.joined)
    if args.list:
        for name, step in known.items():
            print(f"{name:14} {step.title}")
        return 0
    if strange := [name for name in args.steps if name not in known]:
        parser.error(f"unknown steps: {', '.join(strange)}; --list names them")
    gpu = device_name(args.device)
    if not gpu:
        print("no NVIDIA GPU answers here (nvidia-smi); --device cpu rehearses the steps", file=sys.stderr)
        return 1
    BUILD.mkdir(parents=True, exist_ok=True)
    env = environment(args.joined)
    for name in args.steps or known:
        kept = BUILD / f"{name}.json"
        if (
            kept.exists()
            and not args.again
            and json.loads(kept.read_text(encoding="utf-8"))["state"] == "passed"
        ):
            continue
        print(f"{name}: {known[name].title} ...", flush=True)
        result = take(name, known[name], env)
        kept.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        print(f"  {result.state} in {result.seconds:g} s: {result.detail}", flush=True)
    results = [
        Result(**json.loads((BUILD / f"{name}.json").read_text(encoding="utf-8")))
        for name in known
        if (BUILD / f"{name}.json").exists()
    ]
    args.docs.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", gpu.split(",")[0].lower()).strip("-")
    (args.docs / f"{stem}.md").write_text(page(gpu, results), encoding="utf-8")
    text = json.dumps({"gpu": gpu, "steps": [asdict(r) for r in results]}, indent=1)
    (args.docs / f"{stem}.json").write_text(text + "\n", encoding="utf-8")
    print(f"page: {args.docs / (stem + '.md')}")
    return 1 if any(r.state == "failed" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
