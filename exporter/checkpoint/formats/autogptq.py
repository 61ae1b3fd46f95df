"""Reads checkpoints in the formats of AutoGPTQ, gptqmodel and AutoAWQ.

The codes are those of compressed.py in another order. `qweight` has 32-bit words, [inputs / n, outputs] for
GPTQ and [inputs, outputs / n] for AWQ; `qzeros` [groups, outputs / n]; `scales` [groups, outputs]; `g_idx`
[inputs] the group of each input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....runtime.errors import CheckpointError
from ...codes import GROUP_SIZES, Codec, Encoded
from ..tensors import Tensors, check_finite, listed, read_json, shown
from .compressed import DECODED_AT_ONCE, INSTEAD, KINDS, PackedTensors, fields, scaled_as

OLD_CONFIG_FILE = "quantize_config.json"  # older AutoGPTQ wrote it instead of a field in config.json
OWN_PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Which of a word's eight outputs AWQ stores in field i.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a model is stored. `is_less_one`: zero points are stored minus one (AutoGPTQ)."""

    codec: Codec
    is_awq: bool
    is_less_one: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.codec.kind == "int4" else 8

    @property
    def per_word(self) -> int:
        return 32 // self.bits


def read_config(directory: Path, config: Mapping[str, object]) -> object:
    """The `quantization_config` of config.json, or the file that older AutoGPTQ wrote instead."""
    raw = config.get("quantization_config")
    if raw or not (directory / OLD_CONFIG_FILE).is_file():
        return raw
    return {"quant_method": "gptq"} | read_json(directory / OLD_CONFIG_FILE)


def read_form(raw: object) -> PackedForm | None:
    """The form that a `quantization_config` describes; None if it is not of GPTQ or AWQ.

    Raises CheckpointError, listing all problems, for an unsupported variant.
    """
    if not isinstance(raw, dict) or raw.get("quant_method") not in ("gptq", "awq"):
        return None
    is_awq = raw["quant_method"] == "awq"
    bits, size = raw.get("bits", raw.get("w_bit")), raw.get("group_size", raw.get("q_group_size"))
    problems = []
    if type(bits) is not int or bits not in ((4,) if is_awq else KINDS):
        problems.append(f"weights of {shown(bits)} bits (known: {'4' if is_awq else '4 or 8'})")
    if type(size) is not int or size not in GROUP_SIZES:
        problems.append(f"group_size {shown(size)} (known: {', '.join(map(str, GROUP_SIZES))})")
    named = raw.get("checkpoint_format") or raw.get("format") or raw.get("version")
    known = ("gemm",) if is_awq else ("gptq", "gptq_v2")
    layout = str(named or known[0]).lower()
    if layout not in known:
        problems.append(f"layout {shown(named)} (known: {', '.join(known)})")
    if is_awq and raw.get("zero_point") is not True:
        problems.append("no zero points")
    if raw.get("dynamic"):
        problems.append("separate settings for some modules (`dynamic`)")
    is_symmetric = raw.get("sym", True)
    if not is_awq and not isinstance(is_symmetric, bool):
        problems.append(f"`sym` is {shown(is_symmetric)}")
    if problems:
        raise CheckpointError(
            f"config.json: the checkpoint is quantized by {raw['quant_method']} in an unsupported form:"
            f" {'; '.join(problems)}; {INSTEAD}"
        )
    assert isinstance(bits, int)
    assert isinstance(size, int)
    codec = Codec(KINDS[bits], size, symmetric=not is_awq and bool(is_symmetric))
    return PackedForm(codec, is_awq, is_less_one=layout == "gptq")


@dataclass(frozen=True, slots=True)
class OwnTensors(PackedTensors):
    """Tensors of which some are stored as `X.qweight` and its related parts, and are read as `X.weight`.

    Create it with `unpacked`, which checks that the parts fit together.
    """

    form: PackedForm | None = None
    ignored: frozenset[str] = frozenset()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        known = {
            name: shape
            for name, shape in self.stored.shapes.items()
            if name not in self.ignored and name.rpartition(".")[2] not in self.parts
        }
        return known | dict(self.packed)

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, or decoded from codes, fp32 [outputs, inputs]."""
        if name not in self.reordered:
            return PackedTensors.read(self, name)
        module = name.removesuffix(".weight")
        codes, zeros = self._codes(module), self._zeros(module).astype(np.float32)
        scales = np.asarray(self.stored.read(f"{module}.scales")).astype(np.float32)
        check_finite(f"{module}.scales", scales)
        groups = self.stored.read(f"{module}.g_idx")
        weight = np.empty(codes.shape, np.float32)
        step = max(1, DECODED_AT_ONCE // len(groups))
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            plain = codes[rows].astype(np.float32) - zeros[:, rows].T[:, groups]
            weight[rows] = plain * scales[:, rows].T[:, groups]
        return weight

    def encoded(self, name: str, scale_dtype: np.dtype) -> Encoded:
        assert name not in self.reordered
        module, (outputs, inputs) = name.removesuffix(".weight"), self.packed[name]
        scales = scaled_as(self.stored.read(f"{module}.scales"), f"{module}.scales", scale_dtype, name)
        codes = self._codes(module)
        grouped = (outputs, self.codec.num_groups(inputs), -1)
        by_output = np.ascontiguousarray(scales.T)
        if self.codec.symmetric:
            signed = (codes.astype(np.int16) - (self.codec.highest + 1)).astype(np.int8)
            return Encoded(signed.reshape(grouped), by_output, None)
        zeros = np.ascontiguousarray(self._zeros(module).astype(np.uint8).T)
        return Encoded(codes.reshape(grouped), by_output, zeros)

    def _codes(self, module: str) -> np.ndarray:
        """[outputs, inputs] uint8."""
        assert self.form is not None
        outputs, inputs = self.packed[f"{module}.weight"]
        words = self.stored.read(f"{module}.qweight")
        if not self.form.is_awq:
            return fields(np.ascontiguousarray(words.T), self.form.bits, inputs)
        return np.ascontiguousarray(_in_order(fields(words, 4, outputs)).T)

    def _zeros(self, module: str) -> np.ndarray:
        """[groups, outputs] int16, ready to be subtracted from codes."""
        assert self.form is not None
        outputs, _ = self.packed[f"{module}.weight"]
        zeros = fields(self.stored.read(f"{module}.qzeros"), self.form.bits, outputs)
        zeros = (_in_order(zeros) if self.form.is_awq else zeros).astype(np.int16)
        return zeros + 1 if self.form.is_less_one else zeros


def _in_order(octets: np.ndarray) -> np.ndarray:
    """AWQ's fields [rows, outputs], with the eight of each word in the order of the outputs."""
    return octets.reshape(len(octets), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(len(octets), -1)


def unpacked(stored: Tensors, form: PackedForm, expected: Collection[str]) -> OwnTensors:
    """A quantized checkpoint's tensors as weights; `expected` are the names of the model's tensors.

    AutoGPTQ stores a bias of zeros for maps without a bias: it is ignored. Raises CheckpointError, listing
    every part that is missing or does not fit.
    """
    shapes = stored.shapes
    packed: dict[str, tuple[int, int]] = {}
    problems: list[str] = []
    reordered = set()
    modules = [key.removesuffix(".qweight") for key in shapes if key.endswith(".qweight")]
    for module in modules:
        shape = shapes[f"{module}.qweight"]
        if len(shape) != 2:
            problems.append(f"{module}.qweight is {list(shape)}, a matrix of words is expected")
            continue
        rows, columns = shape
        packed[f"{module}.weight"] = (
            (columns * form.per_word, rows) if form.is_awq else (columns, rows * form.per_word)
        )
        misfits = list(_misfits(module, *packed[f"{module}.weight"], form, stored))
        problems += misfits
        if not misfits and not form.is_awq and _is_reordered(stored, module, form):
            reordered.add(f"{module}.weight")
    strays = [
        key for key in shapes if key.rpartition(".")[2] in OWN_PARTS and key.rpartition(".")[0] not in modules
    ]
    problems += [f"{key}: there are no codes for it" for key in strays if not problems]
    if not modules:
        problems.append("config.json says the weights are packed, but there is no `qweight`")
    biases = [f"{module}.bias" for module in modules if f"{module}.bias" in shapes]
    ignored = frozenset(name for name in biases if name not in expected and not stored.read(name).any())
    tensors = OwnTensors(stored, form.codec, packed, OWN_PARTS, frozenset(reordered), form, ignored)
    if not problems:
        problems += [problem for module in modules for problem in _zero_problems(tensors, module)]
    if problems:
        raise CheckpointError(
            f"{len(problems)} parts of the quantized checkpoint do not fit:\n  " + listed(problems, "\n  ")
        )
    return tensors


def _misfits(module: str, outputs: int, inputs: int, form: PackedForm, stored: Tensors) -> Iterator[str]:
    shapes, size = stored.shapes, form.codec.group_size or inputs
    if inputs % size:
        yield f"{module}: its {inputs} inputs cannot be in groups of {size}"
        return
    groups = inputs // size
    expected: dict[str, tuple[int, ...]] = {
        "qzeros": (groups, -(-outputs // form.per_word)),
        "scales": (groups, outputs),
    }
    if f"{module}.g_idx" in shapes:
        expected["g_idx"] = (inputs,)
    for part, shape in expected.items():
        present = shapes.get(f"{module}.{part}")
        if present is None:
            yield f"{module}.{part}: missing"
        elif present != shape:
            yield (
                f"{module}.{part} is {list(present)}, {outputs} x {inputs} in groups of {size} need"
                f" {list(shape)}"
            )
        elif part != "scales" and stored.read(f"{module}.{part}").dtype != np.int32:
            yield f"{module}.{part}: 32-bit integers are expected"
    if stored.read(f"{module}.qweight").dtype != np.int32:
        yield f"{module}.qweight: 32-bit integers are expected"


def _is_reordered(stored: Tensors, module: str, form: PackedForm) -> bool:
    """Whether groups are not runs of consecutive inputs (desc_act).

    Raises CheckpointError for a group that does not exist.
    """
    if f"{module}.g_idx" not in stored.shapes:
        return False
    groups = np.asarray(stored.read(f"{module}.g_idx"))
    size = form.codec.group_size or len(groups)
    if groups.min() < 0 or groups.max() >= len(groups) // size:
        raise CheckpointError(f"{module}.g_idx names groups that do not exist; download the file again")
    return not np.array_equal(groups, np.arange(len(groups)) // size)


def _zero_problems(tensors: OwnTensors, module: str) -> Iterator[str]:
    """Zero points that readers interpret differently, or that contradict config.json."""
    zeros, codec = tensors._zeros(module), tensors.codec
    middle = (codec.highest + 1) if codec.symmetric else None
    if middle is not None and (zeros != middle).any():
        yield f"{module}.qzeros: the codes should be symmetric, but not all zero points are {middle}"
    elif codec.symmetric is False and zeros.max() > codec.highest:
        yield (
            f"{module}.qzeros: a stored zero point of {codec.highest} is {codec.highest + 1} to some readers"
            " of AutoGPTQ's format and 0 to others; save the checkpoint again as gptq_v2"
        )
