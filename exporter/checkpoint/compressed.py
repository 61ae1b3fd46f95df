"""Reads the format `pack-quantized` of compressed-tensors, which llm-compressor writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...runtime.errors import CheckpointError
from ..codes import GROUP_SIZES, Codec
from .packed import INSTEAD, KINDS, PackedTensors, Parts, fields, misfits, require
from .tensors import Tensors, shown

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def read_scheme(raw: object) -> Codec | None:
    """The codec that the `quantization_config` of a config.json describes; None if it is not quantized.

    Raises CheckpointError, listing all problems, unless all weights are int4 or int8 in groups of one form.
    """
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(f"config.json: `quantization_config` must be an object, not {shown(raw)}")
    method, form = str(raw.get("quant_method"))[:80], str(raw.get("format"))[:80]
    if (method, form) != ("compressed-tensors", "pack-quantized"):
        kind = method if method != "compressed-tensors" else f"{method} {form}"
        raise CheckpointError(
            f"config.json: the checkpoint is already quantized, in an unsupported form: {kind}; {INSTEAD}"
        )
    groups = raw.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise CheckpointError(
            "config.json: `quantization_config` must have one group with `weights` in `config_groups`: a"
            f" bundle has one form; {INSTEAD}"
        )
    bits, size, symmetric = weights.get("num_bits", 0), weights.get("group_size"), weights.get("symmetric")
    kind, strategy = weights.get("type", "int"), weights.get("strategy", "group")
    problems = []
    if bits not in tuple(KINDS) or kind != "int":
        problems.append(f"weights of {shown(bits)} bits of type {shown(kind)} (known: int of 4 or 8)")
    if strategy != "group" or size not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        problems.append(f"strategy {shown(strategy)} with group_size {shown(size)} (known: group, {known})")
    if not isinstance(symmetric, bool):
        problems.append(f"`symmetric` is {shown(symmetric)}")
    if group.get("input_activations") or group.get("output_activations"):
        problems.append("quantized activations")
    # Each of these changes what the model computes, so it must not be ignored.
    problems += [
        f"a `{key}`" for key in ("kv_cache_scheme", "transform_config", "sparsity_config") if raw.get(key)
    ]
    if problems:
        raise CheckpointError(
            f"config.json: the checkpoint is quantized in an unsupported form: {'; '.join(problems)};"
            f" {INSTEAD}"
        )
    return Codec(KINDS[bits], size, symmetric is True)


def unpacked(stored: Tensors, codec: Codec) -> PackedTensors:
    """A quantized checkpoint's tensors as weights.

    Raises CheckpointError, listing every part that is missing or does not fit.
    """
    shapes = stored.shapes
    packed: dict[str, tuple[int, int]] = {}
    problems: list[str] = []
    for name in [key.removesuffix("_packed") for key in shapes if key.endswith(".weight_packed")]:
        size = stored.read(f"{name}_shape") if f"{name}_shape" in shapes else np.empty(0)
        if size.shape != (2,) or size.dtype.kind != "i" or size.min() < 1:
            problems.append(f"{name}_shape: two positive integers are expected")
            continue
        packed[name] = int(size[0]), int(size[1])
        problems += _misfits(name, *packed[name], codec, stored)
    parts = {f"{name}_{p.removeprefix('weight_')}" for name in packed for p in PARTS}
    problems += [
        f"{key}: there are no codes for it"
        for key in shapes
        if key.rpartition(".")[2] in PARTS and key not in parts and not problems
    ]
    problems += [
        f"{key}: the groups are not runs of consecutive inputs; quantize with actorder static or none"
        for key in shapes
        if key.endswith("_g_idx")
    ]
    if not packed:
        problems.append("config.json says the weights are packed, but there is no `weight_packed`")
    require(problems)

    def unpack(name: str) -> Parts:
        outputs, inputs = packed[name]
        codes = fields(stored.read(f"{name}_packed"), codec.bits, inputs)
        zeros = None
        if not codec.symmetric:
            zeros = fields(stored.read(f"{name}_zero_point").T, codec.bits, outputs).T
        return codes, stored.read(f"{name}_scale"), zeros

    return PackedTensors(stored, codec, packed, PARTS, unpack)


def _misfits(name: str, outputs: int, inputs: int, codec: Codec, stored: Tensors) -> Iterator[str]:
    size, per_word = codec.group_size or 1, 32 // codec.bits
    if inputs % size:
        yield f"{name}: its {inputs} inputs cannot be in groups of {size}"
        return
    groups = inputs // size
    expected = {f"{name}_packed": (outputs, -(-inputs // per_word)), f"{name}_scale": (outputs, groups)}
    if not codec.symmetric:
        expected[f"{name}_zero_point"] = (-(-outputs // per_word), groups)
    need = f"{codec.dtype} codes of {outputs} x {inputs} in groups of {size}"
    yield from misfits(stored, expected, need)
    if codec.symmetric and f"{name}_zero_point" in stored.shapes:
        yield f"{name}_zero_point: config.json says the codes are symmetric"
