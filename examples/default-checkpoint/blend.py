"""Writes the adapter part of the way from one adapter to another that was trained from it, in fp16."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", type=Path, help="adapter directory; its config and tokenizer files are kept")
    parser.add_argument("end", type=Path, help="--out of finetune.py --base START")
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", type=float, default=1.0, help="how far to go (default %(default)s)")
    args = parser.parse_args()
    start, end = load_file(args.start / WEIGHTS), load_file(args.end / WEIGHTS)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "tokenizer_config.json"):
        if args.out != args.start:
            shutil.copyfile(args.start / name, args.out / name)
    blended = {
        name: torch.lerp(tensor.float(), end[name].float(), args.part).half()
        for name, tensor in start.items()
    }
    save_file(blended, args.out / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
