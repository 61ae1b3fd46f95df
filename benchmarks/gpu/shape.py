"""A bundle of random weights in the shape of a real model: what a step costs does not depend on them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from random_checkpoint import SHAPES, write_checkpoint

CLI = (sys.executable, "-c", "from mars_export.cli import main; main()")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--precision", default="fp16")
    args = parser.parse_args()
    source = args.output.with_suffix(".checkpoint")
    if not source.exists():
        write_checkpoint(source, SHAPES[args.shape])
    command = [*CLI, "onnx", str(source), "-o", str(args.output), "--precision", args.precision]
    code = subprocess.run([*command, "--no-reference", "--allow-drift"], check=False).returncode
    if code == 0:
        shutil.rmtree(source)
    return code


if __name__ == "__main__":
    sys.exit(main())
