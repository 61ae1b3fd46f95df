"""Packs in pieces what a machine with a GPU and PyTorch but no network lacks, and unpacks it there.

    python benchmarks/gpu_pack.py pack                     here, with a network: into build/gpu-pack
    python benchmarks/gpu_pack.py unpack                   there, when the pieces have arrived
    python benchmarks/gpu_pack.py pack --python 3.12 --size 25 --platform x86_64

Packed are wheels (ONNX Runtime with CUDA, and what of ours is rarely there), the default checkpoint's base
weights, libmars's programs for a GPU if they were built and, with --file, what you name. `unpack` installs
the wheels into a folder of their own, which `gpu_prove.py` puts on the path; PyTorch and its
CUDA libraries stay where they are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu.libmars import PROGRAMS
from gpu.pieces import SIZE, PiecesError, cut, join

ROOT = Path(__file__).resolve().parents[1]
PACK, WHEELS, JOINED = (
    ROOT / "build" / "gpu-pack",
    ROOT / "build" / "gpu-wheels",
    ROOT / "build" / "gpu-joined",
)
SITE, BASE = "site", "base"
RUNTIME = "onnxruntime-gpu==1.31.1"  # built for CUDA 13: cublas, cudart and curand come with PyTorch's wheels
# What a machine with PyTorch and transformers lacks; the rest of ours (numpy, tokenizers, jinja2, typer,
# rich, onnx, ml_dtypes, safetensors, peft, pytest, hypothesis) is usually there. --also adds to it.
ALSO = ("gguf", "llguidance", "jsonschema", "referencing", "rpds-py", "jsonschema-specifications")
GLIBC = (28, 27, 24, 17, 5, 12, 31, 34)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s pack|unpack",
    )
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("--pieces", type=Path, default=PACK, help="folder of the pieces")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="where wheels are kept between two calls")
    parser.add_argument("--into", type=Path, default=JOINED, help="where `unpack` puts the files")
    parser.add_argument("--python", default="3.12", help="Python there")
    parser.add_argument("--platform", default="x86_64", help="processor there")
    parser.add_argument("--size", type=int, default=SIZE >> 20, help="MiB of a piece, at most 25")
    parser.add_argument("--also", nargs="*", default=[], help="more packages, without what they need")
    parser.add_argument(
        "--file", nargs="*", type=Path, default=[], help="more files, such as a packed bundle"
    )
    args = parser.parse_args()
    try:
        return pack(args) if args.what == "pack" else unpack(args)
    except PiecesError as error:
        print(error, file=sys.stderr)
        return 1


def pack(args: argparse.Namespace) -> int:
    if not 1 <= args.size <= SIZE >> 20:
        raise PiecesError(f"--size is 1 to {SIZE >> 20} MiB, not {args.size}")
    from mars_export.exporter.checkpoint.default import BASE_NAME

    wheels = [fetch(name, args) for name in (RUNTIME, *ALSO, *args.also)]
    base = fetch(BASE_NAME, args)
    sources = [*((f"wheels/{wheel.name}", wheel) for wheel in wheels), (f"{BASE}/{base.name}", base)]
    sources += [(f"files/{path.name}", path) for path in args.file]
    sources += [(f"cpp/{path.name}", path) for path in programs()]
    pieces = cut(sources, args.pieces, args.size << 20)
    print(f"{len(pieces)} pieces of {args.size} MiB at {args.pieces}:")
    for name, source in sources:
        print(f"  {source.stat().st_size / 1e6:7.1f} MB  {name}")
    return 0


def programs() -> list[Path]:
    """libmars's tests for a GPU, which have the library inside them, where they were built. They take ONNX
    Runtime from the wheel there: its C interface is the same in both of its wheels.
    """
    folder = ROOT / "build" / "cpp" / "release" / "tests"
    return [folder / name for name in PROGRAMS if (folder / name).exists()]


def fetch(name: str, args: argparse.Namespace) -> Path:
    """The wheel of a package for the other machine, from the folder of wheels or the index."""
    project, _, number = name.partition("==")
    stem = project.replace("-", "_")
    args.wheels.mkdir(parents=True, exist_ok=True)
    kept = sorted(args.wheels.glob(f"{stem}-{number or '*'}-*.whl"))
    if not kept:
        tag = args.python.replace(".", "")
        platforms = [f"--platform=manylinux_2_{n}_{args.platform}" for n in GLIBC]
        platforms += [f"--platform=manylinux2014_{args.platform}"]
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        ]  # fmt: skip
        command += ["--only-binary=:all:", f"--python-version={args.python}", "--implementation=cp"]
        command += [f"--abi=cp{tag}", "--abi=abi3", "--abi=none", *platforms, "-d", str(args.wheels), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        kept = sorted(args.wheels.glob(f"{stem}-{number or '*'}-*.whl"))
        if done.returncode or not kept:
            last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise PiecesError(f"{name} for Python {args.python}: {last}")
    return kept[-1]


def unpack(args: argparse.Namespace) -> int:
    """Join the pieces when all have arrived, and install the wheels."""
    if missing := join(args.pieces, args.into):
        print(f"still to come: {len(missing)} pieces, from {missing[0]} on")
        return 0
    install(sorted((args.into / "wheels").glob("*.whl")), args.into / SITE)
    print(f"all is here; next: {Path(sys.executable).name} benchmarks/gpu_prove.py --joined {args.into}")
    return 0


def install(wheels: Sequence[Path], site: Path) -> None:
    """Into a folder that goes first on the path: what has the same name elsewhere is hidden, not changed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--upgrade", "--target", str(site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PiecesError(f"the wheels do not install: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    sys.exit(main())
