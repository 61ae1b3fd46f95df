"""Checkpoints that others quantized: their codes as weights, or unchanged for a bundle of the same form.

Methods such as GPTQ, AWQ and AutoRound choose codes with a calibration text and much memory. Three formats
are read: `pack-quantized` of compressed-tensors, which llm-compressor writes, and those of AutoGPTQ (and
gptqmodel) and of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.errors import CheckpointError, ExportError
from ..codes import GROUP_SIZES, Codec, Encoded, Quantization
from .dims import Dims, expected_shapes
from .names import is_linear
from .tensors import Tensors, check_finite, first_of, read_json, shown

KINDS = {4: "int4", 8: "int8"}
INSTEAD = (
    "export the original checkpoint, or quantize it with llm-compressor in the format pack-quantized"
    " (docs/quantization.md)"
)
OLD_CONFIG_FILE = "quantize_config.json"  # older AutoGPTQ wrote it instead of a field in config.json
GROUPS = ", ".join(map(str, GROUP_SIZES))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight outputs AWQ stores in field i
DECODED_AT_ONCE = 1 << 21  # numbers of a weight, to keep temporaries small
# The stored parts of a weight, after the name of its module: codes, scales, zero points, and others.
PACK_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
GPTQ_PARTS = ("qweight", "scales", "qzeros", "g_idx")


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a model is stored, by its `method`: gptq, awq or compressed-tensors.

    `is_less_one`: zero points are stored minus one (AutoGPTQ).
    """

    method: str
    codec: Codec
    is_less_one: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return PACK_PARTS if self.method == "compressed-tensors" else GPTQ_PARTS

    @property
    def per_word(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // self.codec.bits


def read_form(directory: Path, config: Mapping[str, Any]) -> PackedForm | None:
    """The form that a config.json describes, or the file that older AutoGPTQ wrote instead; None if the
    checkpoint is not quantized.

    Raises CheckpointError, listing all problems, for an unsupported one.
    """
    raw = config.get("quantization_config")
    if not raw:
        if not (directory / OLD_CONFIG_FILE).is_file():
            return None
        raw = {"quant_method": "gptq"} | read_json(directory / OLD_CONFIG_FILE)
    if not isinstance(raw, dict):
        raise CheckpointError(f"config.json: `quantization_config` must be an object, not {shown(raw)}")
    method, layout = str(raw.get("quant_method"))[:80], str(raw.get("format"))[:80]
    kind = f"{method} {layout}" if method == "compressed-tensors" else method
    form: PackedForm | None = None
    problems: list[str] = []
    if method in ("gptq", "awq"):
        form, problems = _gptq_form(raw, method)
    elif kind == "compressed-tensors pack-quantized":
        form, problems = _pack_form(raw)
    if form is None:
        what = ": ".join([kind, *(["; ".join(problems)] if problems else [])])
        raise CheckpointError(
            f"config.json: the checkpoint is quantized in an unsupported form: {what}; {INSTEAD}"
        )
    return form


def _gptq_form(raw: Mapping[str, Any], method: str) -> tuple[PackedForm | None, list[str]]:
    """The form of a GPTQ or AWQ checkpoint, and what is not supported."""
    is_awq = method == "awq"
    bits, size = raw.get("bits", raw.get("w_bit", 0)), raw.get("group_size", raw.get("q_group_size"))
    problems = []
    if bits not in ((4,) if is_awq else tuple(KINDS)):
        problems.append(f"weights of {shown(bits)} bits (known: {'4' if is_awq else '4 or 8'})")
    if size not in GROUP_SIZES:
        problems.append(f"group_size {shown(size)} (known: {GROUPS})")
    named = raw.get("checkpoint_format") or raw.get("format") or raw.get("version")
    known = ("gemm",) if is_awq else ("gptq", "gptq_v2")
    layout = str(named or known[0]).lower()
    if layout not in known:
        problems.append(f"layout {shown(named)} (known: {', '.join(known)})")
    if is_awq and raw.get("zero_point") is not True:
        problems.append("no zero points")
    if raw.get("dynamic"):
        problems.append("separate settings for some modules (`dynamic`)")
    is_symmetric = not is_awq and raw.get("sym", True)
    if not isinstance(is_symmetric, bool):
        problems.append(f"`sym` is {shown(is_symmetric)}")
    if problems:
        return None, problems
    return PackedForm(method, Codec(KINDS[int(bits)], size, is_symmetric), layout == "gptq"), []


def _pack_form(raw: Mapping[str, Any]) -> tuple[PackedForm | None, list[str]]:
    """The form of a compressed-tensors checkpoint, and what is not supported."""
    groups = raw.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        return None, ["`config_groups` must have one group with `weights`: a bundle has one form"]
    bits, size, symmetric = weights.get("num_bits", 0), weights.get("group_size"), weights.get("symmetric")
    kind, strategy = weights.get("type", "int"), weights.get("strategy", "group")
    problems = []
    if bits not in tuple(KINDS) or kind != "int":
        problems.append(f"weights of {shown(bits)} bits of type {shown(kind)} (known: int of 4 or 8)")
    if strategy != "group" or size not in GROUP_SIZES:
        problems.append(f"strategy {shown(strategy)} with group_size {shown(size)} (known: group, {GROUPS})")
    if not isinstance(symmetric, bool):
        problems.append(f"`symmetric` is {shown(symmetric)}")
    if group.get("input_activations") or group.get("output_activations"):
        problems.append("quantized activations")
    # Each of these changes what the model computes, so it must not be ignored.
    problems += [
        f"a `{key}`" for key in ("kv_cache_scheme", "transform_config", "sparsity_config") if raw.get(key)
    ]
    if problems:
        return None, problems
    return PackedForm("compressed-tensors", Codec(KINDS[bits], size, symmetric is True)), []


class PackedTensors:
    """Tensors, some stored as codes and related parts, which are read as `X.weight`.

    packed: [outputs, inputs] by the name of the weight
    """

    def __init__(self, stored: Tensors, form: PackedForm, expected: Collection[str]) -> None:
        """`expected` are the names of the model's tensors: AutoGPTQ stores a bias of zeros for maps without a
        bias, which is ignored. Raises CheckpointError, listing every part that is missing or does not fit.
        """
        self.stored, self.form, self.codec = stored, form, form.codec
        self.packed: dict[str, tuple[int, int]] = {}
        if problems := list(self._problems()):
            raise CheckpointError(
                f"{len(problems)} parts of the quantized checkpoint do not fit:\n  "
                + first_of(problems, "\n  ")
            )
        biases = [f"{name.removesuffix('.weight')}.bias" for name in self.packed]
        self._ignored = {
            name
            for name in biases
            if name in stored.shapes and name not in expected and not stored.read(name).any()
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        plain = {
            name: shape
            for name, shape in self.stored.shapes.items()
            if name not in self._ignored and name.rpartition(".")[2] not in self.form.parts
        }
        return plain | self.packed

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, or decoded from codes, fp32 [outputs, inputs]."""
        if name not in self.packed:
            return self.stored.read(name)
        encoded, weight = self.encoded(name, np.dtype(np.float32)), np.empty(self.packed[name], np.float32)
        step = max(1, DECODED_AT_ONCE // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            weight[rows] = encoded.rows(rows).decoded().reshape(-1, weight.shape[1])
        return weight

    def holds(self, name: str, codec: Codec) -> bool:
        """Whether `name` is stored as codes of the form that `codec` makes."""
        return self.codec == codec and name in self.packed

    def encoded(self, name: str, scale_dtype: np.dtype) -> Encoded:
        """The codes of a packed weight.

        Raises CheckpointError for scales that are NaN or Inf, OverflowError beyond `scale_dtype`.
        """
        module, (outputs, inputs) = name.removesuffix(".weight"), self.packed[name]
        codes, scales, zeros = self._codes(module, inputs), self._part(module, 1), None
        if self.form.parts is GPTQ_PARTS:
            scales = scales.T
        check_finite(f"{name}, its scales", scales)
        with np.errstate(over="ignore"):
            converted = np.ascontiguousarray(scales).astype(scale_dtype)
        if not np.isfinite(converted).all():
            raise OverflowError(name)
        if self.codec.symmetric:
            codes = (codes.astype(np.int16) - (self.codec.highest + 1)).astype(np.int8)
        else:
            zeros = self._zeros(module, outputs).astype(np.uint8).T
        return Encoded(codes.reshape(outputs, self.codec.num_groups(inputs), -1), converted, zeros)

    def _part(self, module: str, which: int) -> np.ndarray:
        return self.stored.read(f"{module}.{self.form.parts[which]}")

    def _codes(self, module: str, inputs: int) -> np.ndarray:
        """[outputs, inputs] uint8."""
        words = self._part(module, 0)
        if self.form.method == "awq":
            return np.ascontiguousarray(_in_order(fields(words, 4)).T)
        return fields(words.T if self.form.method == "gptq" else words, self.codec.bits)[:, :inputs]

    def _zeros(self, module: str, outputs: int) -> np.ndarray:
        """[groups, outputs] int16, ready to be subtracted from codes."""
        words = self._part(module, 2)
        zeros = fields(words if self.form.parts is GPTQ_PARTS else words.T, self.codec.bits)[:, :outputs]
        zeros = _in_order(zeros) if self.form.method == "awq" else zeros
        return zeros.astype(np.int16) + self.form.is_less_one

    def _problems(self) -> Iterator[str]:
        """The errors in all parts. Fills `packed`."""
        codes, *others = (f".{part}" for part in self.form.parts)
        names, is_gptq = self.stored.shapes, self.form.parts is GPTQ_PARTS
        modules = [key.removesuffix(codes) for key in names if key.endswith(codes)]
        if not modules:
            yield f"config.json says the weights are packed, but there is no `{codes[1:]}`"
        sound = True
        for module in modules:
            problems = list(self._misfits(module))
            sound = sound and not problems
            yield from problems
        if sound:
            strays = (
                key for key in names if key.endswith(tuple(others)) and key.rpartition(".")[0] not in modules
            )
            yield from (f"{key}: there are no codes for it" for key in strays)
        if not is_gptq:
            yield from (
                f"{key}: the groups are not runs of consecutive inputs; quantize with actorder static or none"
                for key in names
                if key.endswith("_g_idx")
            )
        elif sound:
            for module in modules:
                yield from self._unreadable(module)

    def _misfits(self, module: str) -> Iterator[str]:
        """The errors in the parts of one weight."""
        stored, per_word = self.stored.shapes, self.form.per_word
        codes, scales, zeros, other = (f"{module}.{part}" for part in self.form.parts)
        if self.form.parts is PACK_PARTS:
            shape = self.stored.read(other) if other in stored else np.empty(0)
            if shape.shape != (2,) or shape.dtype.kind != "i" or shape.min() < 1:
                yield f"{other}: two positive integers are expected"
                return
            outputs, inputs = map(int, shape)
        elif len(stored[codes]) != 2:
            yield f"{codes} is {list(stored[codes])}, a matrix of words is expected"
            return
        else:
            rows, columns = stored[codes]
            is_awq = self.form.method == "awq"
            outputs, inputs = (columns * per_word, rows) if is_awq else (columns, rows * per_word)
        self.packed[f"{module}.weight"] = outputs, inputs
        size = self.codec.group_size or 1
        if inputs % size:
            yield f"{module}.weight: its {inputs} inputs cannot be in groups of {size}"
            return
        groups, needed = inputs // size, dict[str, tuple[int, ...]]()
        if self.form.parts is PACK_PARTS:
            needed |= {codes: (outputs, -(-inputs // per_word)), scales: (outputs, groups)}
            if not self.codec.symmetric:
                needed[zeros] = (-(-outputs // per_word), groups)
            elif zeros in stored:
                yield f"{zeros}: config.json says the codes are symmetric"
        else:
            needed |= {zeros: (groups, -(-outputs // per_word)), scales: (groups, outputs)}
            needed |= {codes: stored[codes]} | ({other: (inputs,)} if other in stored else {})
        for part, dims in needed.items():
            if part not in stored:
                yield f"{part}: missing"
            elif stored[part] != dims:
                need = (
                    f"{self.codec.dtype} codes of {outputs} x {inputs} in groups of {size} need {list(dims)}"
                )
                yield f"{part} is {list(stored[part])}, {need}"
            elif part != scales and self.stored.read(part).dtype != np.int32:
                yield f"{part}: 32-bit integers are expected"

    def _unreadable(self, module: str) -> Iterator[str]:
        """GPTQ's groups in another order, and zero points that are ambiguous or contradict config.json."""
        codec, index = self.codec, f"{module}.g_idx"
        if index in self.stored.shapes:
            groups = self.stored.read(index)
            if not np.array_equal(groups, np.arange(len(groups)) // (codec.group_size or 1)):
                yield (
                    f"{index}: the groups are in the order of activations (desc_act); quantize the original"
                    " without desc_act, or with static groups"
                )
        zeros, middle = self._zeros(module, self.packed[f"{module}.weight"][0]), codec.highest + 1
        if codec.symmetric and (zeros != middle).any():
            yield f"{module}.qzeros: the codes should be symmetric, but not all zero points are {middle}"
        elif not codec.symmetric and zeros.max() > codec.highest:
            yield (
                f"{module}.qzeros: a stored zero point of {codec.highest} is {codec.highest + 1} to some"
                " readers of AutoGPTQ's format and 0 to others; save the checkpoint again as gptq_v2"
            )


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned fields of 4 or 8 bits in each row of int32 words, lowest first, as uint8."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(len(words), -1)
    return np.stack([octets & 0xF, octets >> 4], -1).reshape(len(words), -1) if bits == 4 else octets


def _in_order(octets: np.ndarray) -> np.ndarray:
    """AWQ's fields [rows, outputs], with the eight of each word in the order of the outputs."""
    return octets.reshape(len(octets), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(len(octets), -1)


def require_same_form(tensors: Tensors, dims: Dims, storage: Quantization | None) -> None:
    """Raise ExportError if a checkpoint's int4 or int8 codes would be rounded again to another form of the
    same width.

    Wider forms (fp32, int8 for int4 codes, w8a8) are allowed, because they lose next to nothing; so is w8a8
    for int8 codes, but not w4a8 for int4 codes, whose scales are no integers times one of the channel.
    """
    if not isinstance(tensors, PackedTensors) or storage is None:
        return
    if storage.linear.kind != tensors.codec.kind or (storage.is_integer and storage.linear.bits == 8):
        return
    codec = tensors.codec
    problems: list[str] = []
    if codec != storage.linear:
        flags = f"--precision {codec.kind} --group {codec.group_size}"
        flags += "" if codec.symmetric else " --asymmetric"
        problems.append(
            f"the checkpoint's weights are {codec.dtype} codes in groups of {codec.group_size}"
            f" and would be rounded a second time: export with {flags}, or with a wider --precision"
        )
    plain = [name for name, _ in expected_shapes(dims) if is_linear(name) and name not in tensors.packed]
    if plain:
        problems.append(
            f"the checkpoint keeps {len(plain)} Linear weights unquantized, and an {codec.kind} bundle would"
            f" round them: {first_of(plain)}"
        )
    if problems:
        raise ExportError("; ".join(problems))
