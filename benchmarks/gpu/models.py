"""The models and programs that the stages of half_hour.py compare, made once in build/gpu."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from gpu_pack import LLAMA, fetched

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
    from random_checkpoint import SHAPES, write_bundle

    path = WORK / f"{name}-{precision}.bundle"
    if name == "base":
        path = WORK / "peers" / f"{precision}.bundle"  # which peers.py finds there
    if path.exists():
        return path
    if name != "base":
        write_bundle(path, SHAPES[name], precision)
        return path
    more = ["--quantizer", "round"] if precision == "int4" else []  # gptq takes minutes
    cli("onnx", "-o", path, "--no-reference", "--allow-drift", "--precision", precision, *more, log=path.stem)
    return path


def build_llama(device: str, arch: str) -> Iterator[Row]:
    """llama.cpp, from the sources in llama-cpp-python; it runs on other machines with this card, too."""
    source, out = WORK / "llama-source", WORK / "llama"
    needed = ("cmake", "ninja", *(("nvcc",) if device == "cuda" else ()))
    if absent := [name for name in needed if shutil.which(name) is None]:
        raise MissingError(f"{', '.join(absent)} is not here")
    if not source.exists():
        with tarfile.open(fetched(LLAMA, "")) as tar:
            tar.extractall(source, filter="data")
    off = [
        f"-DLLAMA_{name}=OFF"
        for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "OPENSSL")
    ]
    off += [f"-D{name}=OFF" for name in ("LLAMA_USE_PREBUILT_UI", "GGML_NATIVE", "GGML_OPENMP")]
    more = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"]
    if device == "cuda":  # NO_VMM: without the driver's library, which a machine without a GPU lacks
        code = arch if arch == "native" else f"{arch}-real"
        more += ["-DGGML_CUDA=ON", "-DGGML_CUDA_NO_VMM=ON", f"-DCMAKE_CUDA_ARCHITECTURES={code}"]
    tree = next(source.glob("*/vendor/llama.cpp"))
    ran(["cmake", "-G", "Ninja", "-S", tree, "-B", out, *off, *more], "llama-configure")
    ran(["ninja", "-C", out, *TOOLS], "llama-build")
    yield {"built": ", ".join(TOOLS), "in": out / "bin"}


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
