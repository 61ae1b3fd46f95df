"""Makes checkpoints and bundles of real shapes with random weights that pass for MARS ones.

python -m random_checkpoint SHAPE DIRECTORY      # in fp16 and of Llama's type, which every peer reads
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mars_export.exporter import export
from mars_export.exporter.checkpoint.dims import Dims, dims_from_config, expected_shapes
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph.weights import Placed, write_weights
from peers import tensors_file

BF16 = np.dtype(ml_dtypes.bfloat16)
# Random numbers that all tensors are cut from: 7 billion of them would take longer than the export.
POOL = 1 << 24
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a config.json that differ between sizes and families."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    model_type: str = "qwen2"


SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 512, True, "llama"),
    "135M": Shape(576, 1536, 30, 9, 3, 49152, True, "llama"),  # of the default checkpoint
    "8B": Shape(4096, 14336, 32, 32, 8, 128256, False, "llama"),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
}


def config_of(shape: Shape) -> dict[str, object]:
    fixed = {
        "architectures": [f"{shape.model_type.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    return fixed | asdict(shape)


class RandomTensors:
    """Numbers for every name of `shapes`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
        self.shapes = shapes
        self._pool = (np.random.default_rng(seed).standard_normal(POOL, np.float32) * 0.02).astype(BF16)
        self._offsets = np.random.default_rng(seed + 1)

    def read(self, name: str) -> np.ndarray:
        if name.endswith("norm.weight"):
            return np.ones(self.shapes[name], BF16)
        return np.resize(self._pool[int(self._offsets.integers(POOL // 2)) :], self.shapes[name])


def write_checkpoint(target: Path, shape: Shape, seed: int = 0, dtype: np.dtype = BF16) -> None:
    """Write a Hugging Face directory; an interrupted call leaves nothing at `target`."""
    config = config_of(shape) | {"torch_dtype": dtype.name}
    tensors = RandomTensors(dict(expected_shapes(dims_from_config(config))), seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        tensors_file.write(made / "model.safetensors", tensors.shapes, dtype, tensors.read)
        (made / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [258]}), encoding="utf-8")
        _write_tokenizer(made)
        os.rename(made, target)


def write_bundle(target: Path, shape: Shape, precision: str) -> None:
    """Write a bundle for ONNX Runtime, without a checkpoint or a self-check. Its layers are the same bytes of
    the file, which are copied to the memory of a GPU for each layer.
    """
    dims = dims_from_config(config_of(shape))

    def write(file: BinaryIO, tensors: RandomTensors, dims: Dims, *settings: Any) -> dict[str, Placed]:
        placed = write_weights(file, tensors, replace(dims, num_layers=1), *settings)
        first = [entry for name, entry in placed.items() if name.startswith("layers.0.")]
        names = [(e, e.name.replace("0", str(i), 1)) for e in first for i in range(1, dims.num_layers)]
        return placed | {name: replace(entry, name=name) for entry, name in names}

    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch) / "tiny", SHAPES["tiny"])  # for its tokenizer
        opened = open_checkpoint(str(Path(scratch) / "tiny"))
        opened = replace(opened, dims=dims, tensors=RandomTensors(dict(expected_shapes(dims))))
        options = ExportOptions(precision=precision, quantizer="round" if precision == "int4" else "auto")
        with patch.multiple(
            export, write_weights=write, weight_bytes=lambda *_: 0, _self_check=lambda *_: None
        ):
            export.export_onnx(opened, target, options)


def _write_tokenizer(directory: Path) -> None:
    """Bytes as tokens, and the special ones: enough to be a tokenizer with a mask token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


if __name__ == "__main__":
    write_checkpoint(
        Path(sys.argv[2]), replace(SHAPES[sys.argv[1]], model_type="llama"), dtype=np.dtype(np.float16)
    )
