"""Writes valid checkpoints of one layer with random weights, in every form that the exporter reads.

It needs neither torch nor the tools that usually write such checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mars_export.exporter.checkpoint.tensors import open_tensors
from random_checkpoint import Shape, write_checkpoint

SHAPE = Shape(64, 96, 1, 4, 2, 288, tie_word_embeddings=False)
GROUP = 32
Arrays = dict[str, np.ndarray]
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}


def save(path: Path, arrays: Arrays) -> None:
    """A safetensors file."""
    entries, end = {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        kind = NAMES[array.dtype.name]
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    content = [len(header).to_bytes(8, "little"), header, *(a.tobytes() for a in arrays.values())]
    path.write_bytes(b"".join(content))


def change(path: Path, **fields: Any) -> None:
    """Fields of a JSON file, which there need not be yet."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(value | fields), encoding="utf-8")


def arrays_of(directory: Path) -> Arrays:
    tensors = open_tensors(directory)
    return {name: np.asarray(tensors.read(name)) for name in tensors.shapes}


def sharded(directory: Path) -> None:
    write_checkpoint(directory, Shape(64, 96, 1, 4, 2, 288, tie_word_embeddings=True, shard_bytes=60_000))


def plain(directory: Path) -> None:
    """One file, no index."""
    write_checkpoint(directory, SHAPE)
    arrays = arrays_of(directory)
    for path in [*directory.glob("*.index.json"), *directory.glob("model-*")]:
        path.unlink()
    save(directory / "model.safetensors", {n: a.astype(ml_dtypes.bfloat16) for n, a in arrays.items()})


def adapter(directory: Path) -> None:
    """An adapter with the base beside it; its name is put in where the two are copied to."""
    plain(directory / "base")
    random = np.random.default_rng(1)
    arrays = {}
    for module, outputs in (("q_proj", 64), ("v_proj", 32)):
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        arrays[f"{name}.lora_A.weight"] = random.standard_normal((4, 64), np.float32)
        arrays[f"{name}.lora_B.weight"] = random.standard_normal((outputs, 4), np.float32) / 10
    save(directory / "adapter_model.safetensors", arrays)
    change(
        directory / "adapter_config.json",
        peft_type="LORA", base_model_name_or_path="", r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM", alpha_pattern={"layers.0.self_attn.v_proj": 3}, rank_pattern={},
    )  # fmt: skip


def quantized(
    directory: Path, codes: Callable[[np.random.Generator, int, int], Arrays], **config: Any
) -> None:
    """A plain one whose Linear weights are random codes."""
    plain(directory)
    arrays, random = arrays_of(directory), np.random.default_rng(2)
    for name in [name for name in arrays if name.endswith("_proj.weight")]:
        outputs, inputs = arrays.pop(name).shape
        module = name.removesuffix("weight")
        arrays |= {module + part: array for part, array in codes(random, outputs, inputs).items()}
    save(directory / "model.safetensors", arrays)
    change(directory / "config.json", quantization_config=config)


def words(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.uniform(0.01, 0.02, shape).astype(np.float16)


def gptq(directory: Path) -> None:
    def codes(random: np.random.Generator, outputs: int, inputs: int) -> Arrays:
        return {
            "qweight": words(random, inputs // 8, outputs),
            "qzeros": np.full((inputs // GROUP, outputs // 8), 0x77777777, np.int32),
            "scales": scales(random, inputs // GROUP, outputs),
            "g_idx": (np.arange(inputs) // GROUP).astype(np.int32),
        }

    quantized(directory, codes, quant_method="gptq", bits=4, group_size=GROUP, sym=True, desc_act=False)


def awq(directory: Path) -> None:
    def codes(random: np.random.Generator, outputs: int, inputs: int) -> Arrays:
        return {
            "qweight": words(random, inputs, outputs // 8),
            "qzeros": words(random, inputs // GROUP, outputs // 8),
            "scales": scales(random, inputs // GROUP, outputs),
        }

    settings = {"quant_method": "awq", "version": "gemm", "modules_to_not_convert": None}
    quantized(directory, codes, bits=4, group_size=GROUP, zero_point=True, **settings)


def compressed(directory: Path) -> None:
    def codes(random: np.random.Generator, outputs: int, inputs: int) -> Arrays:
        return {
            "weight_packed": words(random, outputs, inputs // 8),
            "weight_scale": scales(random, outputs, inputs // GROUP),
            "weight_shape": np.array([outputs, inputs], np.int64),
        }

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    kind = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    quantized(directory, codes, config_groups=groups, **kind)


FORMS: dict[str, Callable[[Path], None]] = {
    "plain": plain, "sharded": sharded, "adapter": adapter, "gptq": gptq, "awq": awq,
    "compressed": compressed,
}  # fmt: skip


def write_all(place: Path) -> None:
    """Each form in a directory of its name."""
    for name, write in FORMS.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "adapter":
            (place / name).mkdir()
        write(place / name)
