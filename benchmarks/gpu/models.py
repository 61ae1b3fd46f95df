"""The models and programs that the stages of half_hour.py compare, made once in build/gpu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu"
TOOLS = ("llama-batched-bench", "llama-server", "llama-quantize")
PROMPT, ANSWER, ROUNDS = 128, 64, 3
Row = dict[str, Any]
children: list[subprocess.Popen[bytes]] = []


class MissingError(Exception):
    """Something that a part needs and that is not here."""


def ran(command: list[Any], log: str, *, check: bool = True) -> str:
    """The output of a program, also in build/gpu/LOG.log. Raises RuntimeError with its last line."""
    path = WORK / f"{log}.log"
    with path.open("w") as out:
        words = list(map(str, command))
        children.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT))
        code = children[-1].wait()
    text = path.read_text(errors="replace").strip()
    if code and check:
        raise RuntimeError(f"exit code {code}: {(text.splitlines() or ['no output'])[-1]}")
    return text


def cli(*words: Any, log: str) -> str:
    return ran([sys.executable, "-c", "from mars_export.cli import main; main()", *words], log)


def timed(work: Callable[[], object], count: int) -> float:
    """Median milliseconds after a few runs without the clock."""
    times = []
    for i in range(count + 3):
        begun = time.perf_counter()
        work()
        times += [1000 * (time.perf_counter() - begun)] if i >= 3 else []
    return round(median(times), 3)


def bundle(name: str, precision: str) -> Path:
    """The bundle of the default checkpoint ("base") or of random weights in a shape, exported once."""
    from random_checkpoint import SHAPES, write_checkpoint

    path, source = WORK / f"{name}-{precision}.bundle", WORK / f"{name}.checkpoint"
    if name == "base":
        path = WORK / "peers" / f"{precision}.bundle"  # which peers.py finds there
    if path.exists():
        return path
    if name != "base" and not source.exists():
        write_checkpoint(source, SHAPES[name])
    more = ["--no-reference", "--allow-drift", "--precision", precision]
    more += ["--quantizer", "round"] if precision == "int4" else []  # gptq takes minutes
    cli("onnx", *([] if name == "base" else [source]), "-o", path, *more, log=path.stem)
    return path


def build_llama(unpacked: Path, device: str) -> Iterator[Row]:
    source, out = unpacked / "llama", WORK / "llama"
    if not source.exists() or shutil.which("cmake") is None:
        raise MissingError(f"{source} or cmake is not here")
    off = [f"-D{name}=OFF" for name in ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP")]
    off += ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    gpu = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"] if device == "cuda" else []
    ran(["cmake", "-G", "Ninja", "-S", source, "-B", out, *off, *gpu], "llama-configure")
    ran(["cmake", "--build", out, "-j", max(1, (os.cpu_count() or 4) - 4), "--target", *TOOLS], "llama-build")
    yield {"built": ", ".join(TOOLS)}


def prepared(device: str) -> Iterator[Row]:
    from mars_export.exporter.checkpoint.default import base_directory
    from peers import catalog, models

    work, server = WORK / "peers", WORK / "llama" / "bin" / "llama-server"
    (work / "logs").mkdir(parents=True, exist_ok=True)
    base_directory()
    with ThreadPoolExecutor() as pool:
        jobs: dict[str, Any] = {kind: pool.submit(bundle, "base", kind) for kind in ("fp16", "fp32", "int4")}
        if problem := models.make(catalog.merged(work), work):
            raise MissingError(problem)
        programs = catalog.programs(work, Path(), server if server.exists() else None, device)
        made = {p.model: p for p in programs if p.environment is None and p.module != "ours"}
        jobs |= {path.name: pool.submit(models.make, program, work) for path, program in made.items()}
        for name, job in jobs.items():
            yield {"model": name, "made": job.result() or "yes"}


def exported(name: str, precision: str) -> Iterator[Row]:
    yield {"bundle": bundle(name, precision).name}


def genai_model(precision: str, source: Path) -> Iterator[Row]:
    target = WORK / f"genai-{source.stem}-{precision}"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
    more = [
        "-e",
        "cuda",
        "-p",
        precision,
        "-c",
        WORK / "genai-cache",
        "--extra_options",
        "enable_cuda_graph=true",
    ]
    ran([*command, *more], target.name)
    yield {"model": target.name}
