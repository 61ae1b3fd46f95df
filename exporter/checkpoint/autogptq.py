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

from ...runtime.errors import CheckpointError
from ..codes import GROUP_SIZES, Codec
from .packed import INSTEAD, KINDS, PackedTensors, Parts, fields, misfits, require
from .tensors import Tensors, read_json, shown

OLD_CONFIG_FILE = "quantize_config.json"  # older AutoGPTQ wrote it instead of a field in config.json
PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Which of a word's eight outputs AWQ stores in field i.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a model is stored. `is_less_one`: zero points are stored minus one (AutoGPTQ)."""

    codec: Codec
    is_awq: bool
    is_less_one: bool = False

    @property
    def per_word(self) -> int:
        return 32 // self.codec.bits


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
    bits, size = raw.get("bits", raw.get("w_bit", 0)), raw.get("group_size", raw.get("q_group_size"))
    problems = []
    if bits not in ((4,) if is_awq else tuple(KINDS)):
        problems.append(f"weights of {shown(bits)} bits (known: {'4' if is_awq else '4 or 8'})")
    if size not in GROUP_SIZES:
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
    is_symmetric = not is_awq and raw.get("sym", True)
    if not isinstance(is_symmetric, bool):
        problems.append(f"`sym` is {shown(is_symmetric)}")
    if problems:
        raise CheckpointError(
            f"config.json: the checkpoint is quantized by {raw['quant_method']} in an unsupported form:"
            f" {'; '.join(problems)}; {INSTEAD}"
        )
    codec = Codec(KINDS[int(bits or 0)], size, is_symmetric is True)
    return PackedForm(codec, is_awq, is_less_one=layout == "gptq")


def unpacked(stored: Tensors, form: PackedForm, expected: Collection[str]) -> PackedTensors:
    """A quantized checkpoint's tensors as weights; `expected` are the names of the model's tensors.

    AutoGPTQ stores a bias of zeros for maps without a bias: it is ignored. Raises CheckpointError, listing
    every part that is missing or does not fit.
    """
    shapes, codec = stored.shapes, form.codec
    packed: dict[str, tuple[int, int]] = {}
    problems: list[str] = []
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
        problems += _misfits(module, *packed[f"{module}.weight"], form, stored)
    strays = [
        key for key in shapes if key.rpartition(".")[2] in PARTS and key.rpartition(".")[0] not in modules
    ]
    problems += [f"{key}: there are no codes for it" for key in strays if not problems]
    if not modules:
        problems.append("config.json says the weights are packed, but there is no `qweight`")
    if not problems:
        problems += [problem for module in modules for problem in _unreadable(module, form, stored)]
    require(problems)
    biases = [f"{module}.bias" for module in modules if f"{module}.bias" in shapes]
    ignored = frozenset(name for name in biases if name not in expected and not stored.read(name).any())

    def unpack(name: str) -> Parts:
        module, (outputs, inputs) = name.removesuffix(".weight"), packed[name]
        words = stored.read(f"{module}.qweight")
        if form.is_awq:
            codes = np.ascontiguousarray(_in_order(fields(words, 4, outputs)).T)
        else:
            codes = fields(words.T, codec.bits, inputs)
        zeros = None if codec.symmetric else _zeros(module, form, stored).astype(np.uint8).T
        return codes, stored.read(f"{module}.scales").T, zeros

    return PackedTensors(stored, codec, packed, PARTS, unpack, ignored)


def _zeros(module: str, form: PackedForm, stored: Tensors) -> np.ndarray:
    """[groups, outputs] int16, ready to be subtracted from codes."""
    outputs = stored.shapes[f"{module}.scales"][1]
    zeros = fields(stored.read(f"{module}.qzeros"), form.codec.bits, outputs)
    zeros = (_in_order(zeros) if form.is_awq else zeros).astype(np.int16)
    return zeros + 1 if form.is_less_one else zeros


def _in_order(octets: np.ndarray) -> np.ndarray:
    """AWQ's fields [rows, outputs], with the eight of each word in the order of the outputs."""
    return octets.reshape(len(octets), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(len(octets), -1)


def _misfits(module: str, outputs: int, inputs: int, form: PackedForm, stored: Tensors) -> Iterator[str]:
    size = form.codec.group_size or inputs
    if inputs % size:
        yield f"{module}: its {inputs} inputs cannot be in groups of {size}"
        return
    groups = inputs // size
    expected = {
        f"{module}.qweight": stored.shapes[f"{module}.qweight"],
        f"{module}.qzeros": (groups, -(-outputs // form.per_word)),
        f"{module}.scales": (groups, outputs),
    }
    if f"{module}.g_idx" in stored.shapes:
        expected[f"{module}.g_idx"] = (inputs,)
    yield from misfits(stored, expected, f"{outputs} x {inputs} in groups of {size}")


def _unreadable(module: str, form: PackedForm, stored: Tensors) -> Iterator[str]:
    """Groups in another order, and zero points that are ambiguous or contradict config.json."""
    codec = form.codec
    if f"{module}.g_idx" in stored.shapes:
        groups = stored.read(f"{module}.g_idx")
        if not np.array_equal(groups, np.arange(len(groups)) // (codec.group_size or len(groups))):
            yield (
                f"{module}.g_idx: the groups are in the order of activations (desc_act); quantize the"
                " original without desc_act, or with static groups"
            )
    zeros, middle = _zeros(module, form, stored), codec.highest + 1
    if codec.symmetric and (zeros != middle).any():
        yield f"{module}.qzeros: the codes should be symmetric, but not all zero points are {middle}"
    elif not codec.symmetric and zeros.max() > codec.highest:
        yield (
            f"{module}.qzeros: a stored zero point of {codec.highest} is {codec.highest + 1} to some readers"
            " of AutoGPTQ's format and 0 to others; save the checkpoint again as gptq_v2"
        )
