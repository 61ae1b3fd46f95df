"""The default checkpoint with its adapter merged in: a plain fp32 Hugging Face directory for every peer.

python -m peers.merged DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from mars_export.exporter.checkpoint import default as embedded
from mars_export.exporter.checkpoint.dims import expected_shapes
from mars_export.exporter.checkpoint.open import open_checkpoint
from peers import tensors_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_merged(target: Path) -> None:
    """Write the directory; an interrupted call leaves none behind."""
    checkpoint = open_checkpoint(None)
    base = embedded.base_directory()
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    ends = checkpoint.vocabulary.eos_token_ids
    with tempfile.TemporaryDirectory(prefix=".merging-", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        shapes = dict(expected_shapes(checkpoint.dims))
        tensors_file.write(
            made / "model.safetensors",
            shapes,
            np.dtype(np.float32),
            lambda name: checkpoint.tensors.read(name).astype(np.float32),
        )
        config |= {
            "torch_dtype": "float32",
            "eos_token_id": ends[0],
            "pad_token_id": checkpoint.vocabulary.pad_token_id,
        }
        (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (made / "generation_config.json").write_text(
            json.dumps({"eos_token_id": list(ends), "do_sample": False}), encoding="utf-8"
        )
        for name in TOKENIZER_FILES:
            source = next(d / name for d in (embedded.adapter_directory(), base) if (d / name).is_file())
            shutil.copyfile(source, made / name)
        os.rename(made, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_merged(directory)


if __name__ == "__main__":
    main()
