"""What a GPU has to show, in stages that end themselves: proofs, step times, answers, peers.

    python benchmarks/gpu/half_hour.py capture steps --seconds 240 [--unpacked /tmp] [--device cpu]

build    llama.cpp with its CUDA kernels, also without a GPU (--arch 90): gpu_pack.py takes it along
prepare  bundles of the default checkpoint and onnxruntime-genai's models, side by side
torch    transformers with a static cache and PyTorch's captured step: 135M and 8B of random weights
capture  the card; captured steps against eager ones, bit by bit
steps    milliseconds by slots, rows and KV capacity, of each graph, eager and captured
answers  the CPU's tokens in fp32, exact mode's tokens; tokens/s of assistant and chat at 1 and 8 rows
peers    onnxruntime-genai and llama.cpp with the same weights and rows
large    8B of random weights in fp16 and int4: steps and memory
rtx      a TensorRT-RTX engine, portable and for this card
tests    pytest -m gpu, and libmars's programs for a GPU

A stage prints its rows as they come and all of them in tables last, and writes STAGE.json to $OUT or
build/gpu. What is missing or fails is a row with the reason. `--device cpu` is a rehearsal with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.models import (
    ROOT,
    ROUNDS,
    WORK,
    Row,
    build_llama,
    bundle,
    children,
    prepared,
    ran,
    timed,
)
from gpu.others import batched, compared, engine, genai, torch_steps

PROGRAMS = ("mars-gpu-ort", "mars-gpu")
SLOTS = (1, 2, 4, 8, 15, 16)
STEP_SHAPES = ((1, 1), (1, 8), (1, 15), (8, 1), (8, 8))  # rows, slots
CURSOR, STEPS = 64, 20
Part = tuple[str, Callable[[], Iterator[Row]]]


def enter(unpacked: Path) -> None:
    """Start this program again with our package by its name and what was unpacked first on the path."""
    link, adapter = (
        ROOT / "build" / "typing" / "mars_export",
        ROOT / "exporter/default/adapter_model.safetensors",
    )
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(ROOT)
    if find_spec("mars_export") is None:  # not installed: bundles name the version that wrote them
        found = re.search(r'^__version__ = "(.+)"$', (ROOT / "__init__.py").read_text("utf-8"), re.MULTILINE)
        assert found is not None
        info = link.parent / f"mars_export-{found[1]}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mars-export\nVersion: {found[1]}\n")
    if not adapter.exists() and (unpacked / "base" / adapter.name).exists():
        adapter.symlink_to(unpacked / "base" / adapter.name)
    if (unpacked / "llama").exists() and not (WORK / "llama").exists():
        WORK.mkdir(parents=True, exist_ok=True)
        (WORK / "llama").symlink_to(unpacked / "llama")
    spec = find_spec("nvidia")  # CUDA's libraries in wheels, for programs that do not look there
    roots = (spec.submodule_search_locations or ()) if spec is not None else ()
    libraries = [str(folder) for root in roots for folder in Path(root).glob("*/lib")]
    if libraries:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])
    paths = [unpacked / "site", link.parent, ROOT / "benchmarks", ROOT / "tests"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    if (unpacked / "base").exists():
        os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(unpacked / "base")}
        os.environ |= {"HF_HUB_OFFLINE": "1", "MARS_EXPORT_CACHE": str(WORK / "cache")}
    os.execve(sys.executable, [sys.executable, "-u", *sys.argv, "--entered"], os.environ)


def sessions(path: Path, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What opens each graph of a bundle, on a GPU without and with captured steps; that for CUDA last."""
    from mars_export import Session
    from mars_export.runtime.bundle.open import open_bundle

    variants = [v for v in open_bundle(path).manifest.variants if not v.is_engine]
    for variant in sorted(variants, key=lambda v: v.kv_layout == "cuda"):
        for way, number in {"eager": "0", "captured": "1"}.items():
            if device == "cuda" or way == "eager":
                options = {"enable_cuda_graph": number} if device == "cuda" else None
                settings = {"variant": variant.name, "options": options, "cache_bytes": 0}
                yield (
                    f"{path.stem} {variant.kv_layout} {way}",
                    partial(Session.open, path, device, **settings),
                )


def memory() -> str:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return ran(query, "memory") if shutil.which("nvidia-smi") else ""


def card() -> Iterator[Row]:
    """Name and ceilings of the GPU, versions of what runs on it."""
    import onnxruntime
    import torch
    import transformers

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    name = ran(query, "nvidia-smi") if torch.cuda.is_available() else "no GPU"
    versions = {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__}
    yield {"card": name, **versions, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        source = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
        target = torch.empty_like(source)
        milliseconds = timed(lambda: (target.copy_(source), torch.cuda.synchronize()), 10)
        yield {"copy, GB/s": round(2 * source.nbytes / milliseconds / 1e6)}


def captured(bundle_name: str, precision: str, device: str) -> Iterator[Row]:
    """Steps of changing ids and lengths: logits against the same graph's eager ones, bit by bit, and against
    those of the first step's shape.
    """
    import numpy as np

    from mars_export.runtime.decode.backend import StepInput

    eager: dict[tuple[int, int], Any] = {}
    for name, make in sessions(bundle(bundle_name, precision), device):
        session = make()
        eager = {} if name.endswith("eager") else eager
        for rows, slots in STEP_SHAPES:
            draw, cache, found = np.random.default_rng(slots), session.backend.new_cache(rows), []
            ids = draw.integers(5, 250, (STEPS, rows, slots))
            starts = CURSOR + np.cumsum(draw.integers(1, slots + 1, (STEPS, rows)), 0)
            ids[:, 0, 0], starts[:, 0] = range(5, 5 + STEPS), range(CURSOR, CURSOR + STEPS)  # of every shape
            index = np.tile(np.arange(slots), (rows, 1))
            cache.reserve(CURSOR + (STEPS + 1) * slots)
            prompt = np.tile(np.arange(CURSOR) + 5, (rows, 1)), np.zeros(rows, np.int64), index[:, :1]
            session.backend.step(cache, 0, StepInput(*prompt), False)
            begun = time.perf_counter()
            for step, at in zip(ids, starts, strict=True):
                output = session.backend.step(cache, 0, StepInput(step, at, index), True)
                found.append(np.array(output.logits))
            milliseconds = 1000 * (time.perf_counter() - begun) / STEPS
            base = eager.setdefault((rows, slots), found)
            same = sum(a.tobytes() == b.tobytes() for a, b in zip(found, base, strict=True))
            row = {"session": name, "rows": rows, "slots": slots, "bits as eager": f"{same} of {STEPS}"}
            apart = max(np.abs(a[0, 0] - b[0, 0]).max() for a, b in zip(found, eager[1, 1], strict=True))
            yield {**row, "first slot apart from 1 x 1": f"{apart:.2g}", "ms": round(milliseconds, 3)}


def step_table(
    title: str, make: Callable[[], Any], sizes: list[tuple[int, int]], count: int
) -> Iterator[Row]:
    from steps import step_of

    session = make()
    for rows, capacity in sizes:
        if capacity <= session.backend.max_capacity:
            times = {str(n): timed(step_of(session.backend, n, rows, capacity), count) for n in SLOTS}
            yield {"session": title, "rows": rows, "capacity": capacity, **times, "GPU memory": memory()}


def answers(precision: str, device: str) -> Iterator[Row]:
    """`doctor`'s checks, then `modes.py`'s rows."""
    from modes import measured

    from mars_export import Session
    from mars_export.runtime.cli.doctor import proof

    path = bundle("base", precision)
    session = Session.open(path, device, cache_bytes=0)
    reference = Session.open(path, variant="model", cache_bytes=0) if precision == "fp32" else None
    yield {"check": "variant", "state": session.variant.name, "detail": ""}
    for finding in (f for f in proof(session, reference, precision) if f.state != "absent"):
        yield {"check": finding.subject, "state": finding.state, "detail": finding.detail}
    for task, batch in (("assistant", 1), ("assistant", 8), ("chat", 1), ("chat", 8)):
        few = (1, 1) if device == "cpu" else (8, ROUNDS)
        found = measured(session, task, batch, *few)
        rates = {mode: round(v["tokens_per_second"]) for mode, v in found.items() if isinstance(v, dict)}
        forwards = {"exact, tokens/forward": round(found["exact"]["tokens_per_forward"], 2)}
        row = {"bundle": path.stem, "task": task, "batch": batch, **rates, **forwards}
        yield {**row, "equal": found["equal"]}


def tested(unpacked: Path) -> Iterator[Row]:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", "tests/runtime/device"]
    yield {"tests": "pytest -m gpu", "last": ran(command, "pytest", check=False).splitlines()[-1]}
    spec = find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    os.environ["MARS_ONNXRUNTIME"] = str(Path(spec.origin).parent / "capi")
    base = WORK / "peers" / "fp32.bundle"
    os.environ["MARS_GPU_BUNDLE"] = str(base if base.exists() else bundle("tiny", "fp32"))
    for name in PROGRAMS:
        folders = (unpacked / "programs", ROOT / "build" / "cpp" / "release" / "tests")
        program = next((f / name for f in folders if (f / name).exists()), None)
        last = "not here" if program is None else ran([program], name, check=False).splitlines()[-1]
        yield {"tests": name, "last": last}


def tables(
    name: str, precision: str, device: str, way: str = "", rows: tuple[int, ...] = (1, 8)
) -> list[Part]:
    """A part for each session of a bundle whose title ends with `way`."""
    capacities = (512,) if device == "cpu" else (2048,) if way else (512, 2048, 8192)
    sizes, count = [(n, capacity) for capacity in capacities for n in rows], 30 if device == "cuda" else 3

    def part() -> Iterator[Row]:
        for title, make in sessions(bundle(name, precision), device):
            if title.endswith(way):
                yield from caught(title, lambda t=title, m=make: step_table(t, m, sizes, count))

    return [(f"{name} {precision}", part)]


def stages(device: str, unpacked: Path, arch: str = "native") -> dict[str, list[Part]]:
    """The parts of each stage."""
    small, large, way = ("135M", "8B", "cuda captured") if device == "cuda" else ("tiny", "tiny", "eager")
    base = "base" if (WORK / "peers" / "fp16.bundle").exists() else small
    kinds, tiny = ("fp16", "fp32", "int4"), ("tiny",) if small != "tiny" else ()
    return {
        "build": [("llama.cpp", partial(build_llama, device, arch))],
        "prepare": [("base", partial(prepared, device))],
        "torch": [("card", card), *((n, partial(torch_steps, n, device)) for n in (small, large))],
        "capture": [
            ("card", card),
            *((f"{n} {p}", partial(captured, n, p, device)) for n in (*tiny, base) for p in kinds[:2]),
        ],
        "steps": [part for kind in kinds for part in tables(base, kind, device)],
        "answers": [(kind, partial(answers, kind, device)) for kind in kinds],
        "peers": [
            ("peers.py", partial(compared, device)),
            ("llama.cpp", batched),
            *((f"genai {kind}", partial(genai, WORK / f"peers/genai-{kind}")) for kind in ("fp16", "int4")),
        ],
        "large": [part for kind in ("fp16", "int4") for part in tables(large, kind, device, way)],
        "rtx": [(target, partial(engine, target)) for target in ("portable", "host")],
        "tests": [("tests", partial(tested, unpacked))],
    }  # fmt: skip


def caught(title: str, part: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows of a part; an error is the last one, because what comes next may work."""
    try:
        yield from part()
    except Exception as error:
        yield {"part": title, "problem": f"{type(error).__name__}: {error}"[:400]}


def table(rows: list[Row]) -> Iterator[str]:
    """Markdown: a table for neighbouring rows of the same columns."""
    for columns, some in groupby(rows, key=lambda row: tuple(row)):
        for cells in (columns, ["---"] * len(columns), *(row.values() for row in some)):
            yield f"| {' | '.join(' '.join(str(cell).replace('|', '/').split()) for cell in cells)} |"
        yield ""


def take(name: str, parts: list[Part], seconds: float) -> None:
    """Run a stage. After `seconds` the process ends with what it has."""
    rows: list[Row] = []
    begun = time.monotonic()

    def finish(note: str) -> None:
        rows.append({"stage": name, "seconds": round(time.monotonic() - begun), "end": note})
        out = Path(os.environ.get("OUT", WORK))
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1, default=str) + "\n")
        print("\n".join(table(rows)), flush=True)

    def stop() -> None:
        finish(f"out of time after {seconds:g} s")
        for child in children:
            child.kill()
        os._exit(3)

    watch = threading.Timer(seconds, stop)
    watch.start()
    for title, part in parts:
        for row in caught(title, part):
            rows.append(row)
            print(f"[{time.monotonic() - begun:.0f} s] {row}", flush=True)
    watch.cancel()
    finish("complete")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("stages", nargs="+", metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=540, help="of each stage")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--unpacked", type=Path, default=Path("/tmp"), help="where gpu_pack.py unpacked")
    parser.add_argument(
        "--arch", default="native", help="the card's architecture in `build`: 90 is H100 and H200"
    )
    parser.add_argument("--entered", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if strange := set(args.stages) - set(stages(args.device, args.unpacked)):
        parser.error(f"unknown stages: {', '.join(sorted(strange))}")
    if not args.entered:
        enter(args.unpacked)
    WORK.mkdir(parents=True, exist_ok=True)
    for name in args.stages:
        take(name, stages(args.device, args.unpacked, args.arch)[name], args.seconds)


if __name__ == "__main__":
    main()
