"""Runs libmars's tests on a GPU, with programs that were built here or unpacked by gpu_pack.py.

    python benchmarks/gpu/libmars.py BUNDLE [--joined build/gpu-joined]

Exit code 77 means that there is nothing to run; the last line says why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cpp" / "release" / "tests"
PROGRAMS = ("mars-gpu-ort", "mars-gpu")
SKIPPED = 77


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="in fp32, with what it has for this GPU")
    parser.add_argument("--joined", type=Path, help="what gpu_pack.py unpacked")
    args = parser.parse_args()
    folder = BUILT if args.joined is None else args.joined / "cpp"
    programs = [folder / name for name in PROGRAMS if (folder / name).exists()]
    if not programs:
        print(f"no program of libmars in {folder}: `make cpp` builds them, gpu_pack.py brings them")
        return SKIPPED
    env = {**os.environ, "MARS_GPU_BUNDLE": str(args.bundle)}
    spec = find_spec("onnxruntime")
    if spec is not None and spec.origin is not None:
        env["MARS_ONNXRUNTIME"] = str(Path(spec.origin).parent / "capi")
    codes = []
    for program in programs:
        program.chmod(0o755)
        codes.append(subprocess.run([program], env=env, check=False).returncode)
    bad = [code for code in codes if code not in (0, SKIPPED)]
    return bad[0] if bad else 0 if 0 in codes else SKIPPED


if __name__ == "__main__":
    sys.exit(main())
