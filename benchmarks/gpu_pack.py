"""Packs in pieces what a machine with a GPU, PyTorch and transformers but no network lacks.

    python benchmarks/gpu_pack.py pack [--arch 90] [--size 52]     here: build/gpu-pack/c1, c2, ...
    python benchmarks/gpu_pack.py unpack FOLDER [--into /tmp]      there: /tmp/llama, /tmp/site, ...

Each parcel is a tar file in xz chunks, unpacked once all are in FOLDER: `llama` (llama.cpp, if `half_hour.py
build --arch 90` has built it here; CUDA's libraries come with PyTorch there),
`site` (for PYTHONPATH: ONNX Runtime with CUDA kernels of one architecture, onnxruntime-genai, small wheels),
`base` (base weights and adapter of the default checkpoint), `programs` (libmars's, which change most often:
`--only programs` packs them alone).
"""

from __future__ import annotations

import argparse
import io
import lzma
import mmap
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACK, CACHE = ROOT / "build" / "gpu-pack", ROOT / "build" / "gpu-wheels"
PROGRAMS = tuple(ROOT / "build" / "cpp" / "release" / "tests" / name for name in ("mars-gpu-ort", "mars-gpu"))
# Built for CUDA 13: cublas, cudart and curand come with PyTorch's wheels.
WHEELS = ("onnxruntime-gpu==1.31.1", "onnxruntime-genai-cuda==0.18.0", "gguf", "llguidance", "jsonschema")
WHEELS += ("referencing", "rpds-py", "jsonschema-specifications")
LLAMA, LLAMA_BUILT = "llama-cpp-python==0.3.36", ROOT / "build" / "gpu" / "llama" / "bin"
CHUNK, PARCELS = 32 << 20, ("llama", "site", "base", "programs")
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": CHUNK}]
FATBIN, CODE = struct.pack("<I", 0xBA55ED50), (1, 2)  # CODE: kinds of an entry, PTX and machine code


def trimmed(library: bytes, arch: int) -> bytes:
    """A library whose device code for other architectures is zeros, which compress to nothing: CUDA never
    selects an entry of another architecture than the card's.
    """
    memory = mmap.mmap(-1, len(library))
    memory[:] = library
    at = 0
    while (at := memory.find(FATBIN, at)) >= 0:
        _, header, size = struct.unpack("<HHQ", memory[at + 4 : at + 16])
        end = at + 16 + size
        at += 16
        if header != 16 or end > len(memory):
            continue
        entry = at
        while entry + 64 <= end:
            kind, _, header, size = struct.unpack("<HHIQ", memory[entry : entry + 16])
            if kind not in CODE or not 48 <= header <= 1024:
                break
            if struct.unpack("<I", memory[entry + 28 : entry + 32])[0] != arch:
                memory[entry + header : entry + header + size] = bytes(size)
            entry += header + size
    return memory[:]


def fetched(name: str, python: str) -> Path:
    """A wheel for that Python and x86-64, or llama.cpp's sources, kept in build/gpu-wheels."""
    project, _, number = name.partition("==")
    pattern = f"{project.replace('-', '_')}-{number or '*'}[-.]*"
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (kept := sorted(CACHE.glob(pattern))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(CACHE), name]
        if name == LLAMA:
            command += ["--no-binary=:all:"]
        else:
            command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
            command += [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 17, 5, 12, 34)]
        subprocess.run(command, check=True)
        kept = sorted(CACHE.glob(pattern))
    return kept[-1]


def members(parcel: str, arch: int, python: str) -> Iterator[tuple[str, bytes, bool]]:
    """The files of a parcel: name, content, executable."""
    if parcel == "llama":
        for path in (
            p for shape in ("llama-*", "lib*-impl.so", "lib*.so.?") for p in LLAMA_BUILT.glob(shape)
        ):
            yield f"bin/{path.name}", path.read_bytes(), True
    elif parcel == "site":
        for wheel in (fetched(name, python) for name in WHEELS):
            with zipfile.ZipFile(wheel) as archive:
                for name in (name for name in archive.namelist() if not name.endswith("/")):
                    content = archive.read(name)
                    if name.endswith("providers_cuda.so"):
                        content = trimmed(content, arch)
                    yield name, content, ".so" in name
    elif parcel == "programs":
        for path in (p for p in PROGRAMS if p.exists()):
            yield path.name, path.read_bytes(), True
    else:
        from mars_export.exporter.checkpoint.default import BASE_NAME, IN_CLONE, WEIGHTS

        for path in (fetched(BASE_NAME, python), IN_CLONE / WEIGHTS):
            yield path.name, path.read_bytes(), False


def pack(out: Path, arch: int, size: int, python: str, parcels: Sequence[str] = PARCELS) -> None:
    """Write the pieces, and print what is in them."""
    piece, room = 0, 0
    for parcel in parcels:
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w") as tar:
            for name, content, executable in members(parcel, arch, python):
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(content), 0o755 if executable else 0o644
                tar.addfile(info, io.BytesIO(content))
        step = (
            CHUNK if parcel == "site" else CHUNK // 8
        )  # what is compressed already fills pieces in small chunks
        raw = whole.getvalue()
        chunks = [raw[at : at + step] for at in range(0, len(raw), step)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, data in enumerate(pool.map(lambda c: lzma.compress(c, filters=FILTERS), chunks)):
                if len(data) > room:
                    piece, room = piece + 1, size
                room -= len(data)
                target = out / f"c{piece}" / f"{parcel}.{number:03d}-{len(chunks):03d}.xz"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                print(f"c{piece}  {len(data) / 2**20:6.1f} MiB  {target.name}", flush=True)


def unpack(folder: Path, into: Path) -> None:
    """Extract the parcels whose chunks are all there; a damaged chunk fails its check."""
    parcels: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.xz")):
        parcels.setdefault(path.name.partition(".")[0], []).append(path)
    if not parcels:
        sys.exit(f"error: {folder}: no pieces (*.xz) there; give the folder that they were moved to")
    for name, paths in parcels.items():
        missing = int(paths[0].stem.rpartition("-")[2]) - len(paths)
        if (into / name).exists() or missing:
            print(f"{name}: {f'{missing} chunks to come' if missing else 'there already'}")
            continue
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            whole = b"".join(pool.map(lambda path: lzma.decompress(path.read_bytes()), paths))
        with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
            tar.extractall(into / name, filter="data")
        print(f"{name}: unpacked, {len(whole) / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="what")
    packing = commands.add_parser("pack")
    packing.add_argument("--out", type=Path, default=PACK)
    packing.add_argument("--arch", type=int, default=90, help="the card's architecture: 90 is H100 and H200")
    packing.add_argument("--size", type=int, default=52, help="MiB of a piece")
    packing.add_argument("--only", choices=PARCELS, action="append", help="this parcel; may be repeated")
    packing.add_argument("--python", default="3.12", help="Python there")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("--into", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    if args.what == "unpack":
        unpack(args.folder, args.into)
    elif any(args.out.glob("c*")):
        parser.error(f"{args.out} has pieces already; remove it, or give another --out")
    else:
        pack(args.out, args.arch, args.size << 20, args.python, args.only or PARCELS)


if __name__ == "__main__":
    main()
