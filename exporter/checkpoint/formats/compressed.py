"""Reads checkpoints that are already quantized, in the format `pack-quantized` of compressed-tensors.

Methods such as GPTQ, AWQ and AutoRound choose codes with a calibration text and much memory. llm-compressor
runs them and saves their codes in this format. A bundle of the same kind stores these codes unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ....runtime.errors import CheckpointError, ExportError
from ...codes import GROUP_SIZES, Codec, Encoded, Quantization
from ..architecture.dims import Dims, expected_shapes
from ..architecture.names import is_linear
from ..tensors import Tensors, check_finite, listed, shown

KINDS = {4: "int4", 8: "int8"}
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
INSTEAD = (
    "export the original checkpoint, or quantize it with llm-compressor in the format pack-quantized"
    " (docs/quantization.md)"
)
DECODED_AT_ONCE = 1 << 21  # numbers of a weight, to keep temporaries small


def read_scheme(raw: object) -> Codec | None:
    """The codec that the `quantization_config` of a config.json describes; None if it is not quantized.

    Raises CheckpointError, listing all problems, unless all weights are int4 or int8 in groups of one form.
    """
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(f"config.json: `quantization_config` must be an object, not {shown(raw)}")
    method, form = raw.get("quant_method"), raw.get("format")
    if method != "compressed-tensors" or form != "pack-quantized":
        kind = str(method)[:80] if method != "compressed-tensors" else f"compressed-tensors {str(form)[:80]}"
        raise CheckpointError(
            f"config.json: the checkpoint is already quantized, in an unsupported form: {kind}; {INSTEAD}"
        )
    groups = raw.get("config_groups")
    if (
        not isinstance(groups, dict)
        or len(groups) != 1
        or not isinstance(group := next(iter(groups.values())), dict)
    ):
        raise CheckpointError(
            "config.json: `quantization_config` must have one group in `config_groups`: a bundle has one"
            f" form; {INSTEAD}"
        )
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"config.json: the group of `quantization_config` has no `weights`; {INSTEAD}")
    bits, size, symmetric = weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric")
    problems = []
    if type(bits) is not int or bits not in KINDS or weights.get("type", "int") != "int":
        problems.append(
            f"weights of {shown(bits)} bits of type {shown(weights.get('type', 'int'))} (known: int of 4 or"
            " 8)"
        )
    if weights.get("strategy", "group") != "group" or type(size) is not int or size not in GROUP_SIZES:
        problems.append(
            f"strategy {shown(weights.get('strategy'))} with group_size {shown(size)}"
            f" (known: group, {', '.join(map(str, GROUP_SIZES))})"
        )
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
    assert isinstance(bits, int)
    assert isinstance(size, int)
    return Codec(KINDS[bits], size, bool(symmetric))


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Tensors of which some are stored as codes: `X.weight_packed` and its scales are read as `X.weight`.

    Create it with `unpacked`, which checks that the parts fit together.
    """

    stored: Tensors
    codec: Codec
    packed: Mapping[str, tuple[int, int]]  # [outputs, inputs] by the name of the weight
    parts: tuple[str, ...] = PARTS  # the last words of the names of codes and their related parts
    reordered: frozenset[str] = frozenset()  # weights whose groups are not runs of consecutive inputs

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        plain = {
            name: shape
            for name, shape in self.stored.shapes.items()
            if name.rpartition(".")[2] not in self.parts
        }
        return plain | dict(self.packed)

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, or decoded from codes, fp32 [outputs, inputs]."""
        if name not in self.packed:
            return self.stored.read(name)
        encoded, weight = self.encoded(name, np.dtype(np.float32)), np.empty(self.packed[name], np.float32)
        step = max(1, DECODED_AT_ONCE // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            part = Encoded(
                encoded.codes[rows],
                encoded.scales[rows],
                None if encoded.zeros is None else encoded.zeros[rows],
            )
            weight[rows] = part.decoded().reshape(-1, weight.shape[1])
        return weight

    def holds(self, name: str, codec: Codec) -> bool:
        """Whether `name` is stored as codes of the form that `codec` makes."""
        ours = (self.codec.kind, self.codec.group_size, self.codec.symmetric)
        is_same = ours == (codec.kind, codec.group_size, codec.symmetric)
        return is_same and name in self.packed and name not in self.reordered

    def encoded(self, name: str, scale_dtype: np.dtype) -> Encoded:
        """The codes of a packed weight.

        Raises CheckpointError for scales that are NaN or Inf, OverflowError beyond `scale_dtype`.
        """
        outputs, inputs = self.packed[name]
        bits = 4 if self.codec.kind == "int4" else 8
        scales = scaled_as(self.stored.read(f"{name}_scale"), f"{name}_scale", scale_dtype, name)
        codes, zeros = fields(self.stored.read(f"{name}_packed"), bits, inputs), None
        if self.codec.symmetric:
            codes = (
                (codes ^ (1 << (bits - 1))).view(np.int8) if bits == 8 else codes.view(np.int8) - np.int8(8)
            )
        else:
            zeros = np.ascontiguousarray(
                fields(np.ascontiguousarray(self.stored.read(f"{name}_zero_point").T), bits, outputs).T
            )
        return Encoded(codes.reshape(outputs, self.codec.num_groups(inputs), -1), scales, zeros)


def scaled_as(scales: np.ndarray, part: str, dtype: np.dtype, name: str) -> np.ndarray:
    """The scales `part` of weight `name` in `dtype`.

    Raises CheckpointError for NaN or Inf, OverflowError beyond `dtype`.
    """
    check_finite(part, scales)
    with np.errstate(over="ignore"):
        converted = np.asarray(scales).astype(dtype)
    if not np.isfinite(converted).all():
        raise OverflowError(name)
    return converted


def fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The `count` unsigned fields of 4 or 8 bits in each row of int32 words, lowest first, as uint8."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(len(words), -1)
    if bits == 4:
        octets = np.stack([octets & 0xF, octets >> 4], -1).reshape(len(words), -1)
    return np.ascontiguousarray(octets[:, :count])


def unpacked(stored: Tensors, codec: Codec) -> PackedTensors:
    """A quantized checkpoint's tensors as weights.

    Raises CheckpointError, listing every part that is missing or does not fit.
    """
    shapes = stored.shapes
    packed: dict[str, tuple[int, int]] = {}
    problems: list[str] = []
    for key in shapes:
        name, _, part = key.rpartition("_")
        if part != "packed" or not name.endswith(".weight"):
            continue
        size = stored.read(f"{name}_shape") if f"{name}_shape" in shapes else np.empty(0)
        packed[name] = (
            (int(size[0]), int(size[1])) if size.shape == (2,) and size.dtype.kind == "i" else (0, 0)
        )
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
    if problems:
        raise CheckpointError(
            f"{len(problems)} parts of the quantized checkpoint do not fit:\n  " + listed(problems, "\n  ")
        )
    return PackedTensors(stored, codec, packed)


def _misfits(name: str, outputs: int, inputs: int, codec: Codec, stored: Tensors) -> Iterator[str]:
    shapes, size, per_word = stored.shapes, codec.group_size or 1, 8 if codec.kind == "int4" else 4
    if outputs < 1 or inputs < 1:
        yield f"{name}_shape: two positive integers are expected"
        return
    if inputs % size:
        yield f"{name}: its {inputs} inputs cannot be in groups of {size}"
        return
    groups = inputs // size
    expected = {"packed": (outputs, -(-inputs // per_word)), "scale": (outputs, groups)}
    if not codec.symmetric:
        expected["zero_point"] = (-(-outputs // per_word), groups)
    for part, shape in expected.items():
        present = shapes.get(f"{name}_{part}")
        if present is None:
            yield f"{name}_{part}: missing"
        elif present != shape:
            yield (
                f"{name}_{part} is {list(present)}, {codec.dtype} codes of {outputs} x {inputs} in groups of"
                f" {size} need {list(shape)}"
            )
        elif part != "scale" and stored.read(f"{name}_{part}").dtype != np.int32:
            yield f"{name}_{part}: 32-bit integers are expected"
    if codec.symmetric and f"{name}_zero_point" in shapes:
        yield f"{name}_zero_point: config.json says the codes are symmetric"


def require_same_form(tensors: Tensors, dims: Dims, storage: Quantization | None) -> None:
    """Raise ExportError if a checkpoint's int4 or int8 codes would be rounded again to another form of the
    same width.

    Wider forms (fp32, int8 for int4 codes, w8a8) are allowed, because they lose next to nothing.
    """
    if not isinstance(tensors, PackedTensors) or storage is None or storage.scheme != tensors.codec.kind:
        return
    codec = tensors.codec
    problems: list[str] = []
    if (codec.group_size, codec.symmetric) != (storage.group_size, storage.symmetric):
        flags = f"--precision {codec.kind} --group {codec.group_size}" + (
            "" if codec.symmetric else " --asymmetric"
        )
        problems.append(
            f"the checkpoint's weights are {codec.dtype} codes in groups of {codec.group_size}"
            f" and would be rounded a second time: export with {flags}, or with a wider --precision"
        )
    if tensors.reordered:
        problems.append(
            f"the groups of {len(tensors.reordered)} weights are in the order of activations (desc_act),"
            " which bundles do not support. They would be rounded a second time: export with a wider"
            " --precision, or quantize the original without desc_act"
        )
    plain = [name for name, _ in expected_shapes(dims) if is_linear(name) and name not in tensors.packed]
    if plain:
        problems.append(
            f"the checkpoint keeps {len(plain)} Linear weights unquantized, and an {codec.kind} bundle would"
            f" round them: {listed(plain)}"
        )
    if problems:
        raise ExportError("; ".join(problems))
