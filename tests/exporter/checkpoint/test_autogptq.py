"""GPTQ's and AWQ's own formats: packed here number by number, as their tools' definitions say, and read by
the exporter; codes must reach the graph unchanged, and what is ambiguous is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import tiny
from support.fixtures import Named

from mars_export import CheckpointError, ExportError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.packed import PackedTensors
from mars_export.exporter.codes import Codec
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions

GROUP = 16
BASE = "a2d-qwen3"
K = "model.layers.0.self_attn.k_proj"
# AutoAWQ's gemm packing: `packed |= column[c * 8 + order[i]] << (i * 4)`.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to quantize and to write it down."""

    method: str
    bits: int = 4
    sym: bool = True
    layout: str = "gptq"
    config: str = "config.json"


KINDS = {
    "gptq": Kind("gptq"),
    "gptq-asymmetric": Kind("gptq", sym=False),
    "gptq-v2": Kind("gptq", sym=False, layout="gptq_v2"),
    "gptq-8-bit": Kind("gptq", bits=8),
    "gptq-8-bit-asymmetric": Kind("gptq", bits=8, sym=False, layout="gptq_v2"),
    "gptq-old-file": Kind("gptq", sym=False, config="quantize_config.json"),
    "awq": Kind("awq", sym=False),
}


def pack_across(codes: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Columns of one row share a 32-bit word, the first of `order` in the lowest bits."""
    count = 32 // bits
    fields = codes.reshape(len(codes), -1, count)[:, :, order or range(count)].astype(np.uint64)
    words = (fields << (bits * np.arange(count, dtype=np.uint64))).sum(-1) & 0xFFFFFFFF
    return words.astype(np.uint32).view(np.int32)


def settings(kind: Kind) -> dict[str, Any]:
    if kind.method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    values = {
        "bits": kind.bits, "group_size": GROUP, "sym": kind.sym, "desc_act": False, "damp_percent": 0.01,
        "true_sequential": True,
    }  # fmt: skip
    if kind.config == "config.json":
        values |= {"quant_method": "gptq", "checkpoint_format": kind.layout}
    return values


Truth = dict[str, np.ndarray]  # what every weight stands for


def write(source: Path, target: Path, kind: Kind) -> Truth:
    """A copy of a checkpoint whose Linear weights are random codes, and what these stand for, in float64."""
    shutil.copytree(source, target)
    tensors, truth, random = load_file(source / "model.safetensors"), Truth(), np.random.default_rng(0)
    top = 1 << kind.bits
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        module, groups = name.removesuffix(".weight"), inputs // GROUP
        codes = random.integers(0, top, (inputs, outputs))
        scales = (random.uniform(0.5, 1.5, (groups, outputs)) * 1.6 / top).astype(np.float16)
        zeros = (
            np.full((groups, outputs), top // 2)
            if kind.sym
            else random.integers(top // 2 - 3, top // 2 + 4, (groups, outputs))
        )
        order = np.arange(inputs) // GROUP
        truth[name] = ((codes - zeros[order]) * scales[order].astype(np.float64)).T
        if kind.method == "awq":
            tensors[f"{module}.qweight"] = pack_across(codes, 4, ORDER)
            tensors[f"{module}.qzeros"] = pack_across(zeros, 4, ORDER)
        else:
            less = 1 if kind.layout == "gptq" else 0
            tensors[f"{module}.qweight"] = np.ascontiguousarray(pack_across(codes.T, kind.bits).T)
            tensors[f"{module}.qzeros"] = pack_across((zeros - less) % top, kind.bits)
            tensors[f"{module}.g_idx"] = order.astype(np.int32)
        tensors[f"{module}.scales"] = scales
    save_file(tensors, target / "model.safetensors")
    if kind.config == "config.json":
        tiny.change_config(target, quantization_config=settings(kind))
    else:
        (target / kind.config).write_text(json.dumps(settings(kind)))
    return truth


@pytest.mark.parametrize("name", KINDS)
def test_what_codes_stand_for(name: str, checkpoints: Named, tmp_path: Path) -> None:
    truth = write(checkpoints(BASE), tmp_path / "model", KINDS[name])
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    assert isinstance(checkpoint.tensors, PackedTensors)
    codec = Codec(f"int{KINDS[name].bits}", GROUP, KINDS[name].sym)
    assert all(checkpoint.tensors.holds(weight, codec) for weight in truth), "a bundle has these codes"
    assert checkpoint.tensors.packed.keys() == truth.keys()
    for weight, expected in truth.items():
        np.testing.assert_allclose(checkpoint.tensors.read(weight), expected, rtol=1e-6, atol=1e-7)


def test_biases_of_zeros_that_autogptq_adds_are_passed_over(checkpoints: Named, tmp_path: Path) -> None:
    write(checkpoints(BASE), tmp_path / "model", KINDS["gptq"])
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{K}.bias": np.zeros(48, np.float16)}, path)
    assert f"{K}.bias" not in open_checkpoint(str(tmp_path / "model")).tensors.shapes
    save_file(tensors | {f"{K}.bias": np.eye(1, 48, dtype=np.float16)[0]}, path)
    with pytest.raises(CheckpointError, match=f"not part of a qwen3 model: {K}.bias"):
        open_checkpoint(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"bits": 3}, r"weights of 3 bits \(known: 4 or 8\)"),
        ("gptq", {"group_size": -1}, "group_size -1"),
        ("gptq", {"checkpoint_format": "marlin"}, r"layout 'marlin' \(known: gptq, gptq_v2\)"),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}, "separate settings for some modules"),
        ("gptq", {"sym": "yes"}, "`sym` is 'yes'"),
        ("gptq", {"sym": False, "checkpoint_format": "gptq_v2"}, None),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "not all zero points are 8"),
        ("gptq", {"group_size": 32}, "inputs cannot be in groups of 32"),
        ("awq", {"version": "gemv"}, r"layout 'gemv' \(known: gemm\)"),
        ("awq", {"zero_point": False}, "no zero points"),
        ("awq", {"bits": 8}, r"weights of 8 bits \(known: 4\)"),
        ("awq", {"quant_method": "hqq"}, "in an unsupported form: hqq"),
    ],
)
def test_a_form_that_is_not_read(
    name: str, changes: dict[str, Any], message: str | None, checkpoints: Named, tmp_path: Path
) -> None:
    write(checkpoints(BASE), tmp_path / "model", KINDS[name])
    tiny.change_config(tmp_path / "model", quantization_config=settings(KINDS[name]) | changes)
    if message is None:  # zero points of seven, taken at their word
        open_checkpoint(str(tmp_path / "model"))
        return
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("qzeros", None, "qzeros: missing"),
        ("scales", np.ones((2, 48), np.float16),
         r"scales is \[2, 48\], int4 codes of 48 x 48 in groups of 16 need \[3, 48\]"),
        ("qweight", np.zeros((6, 48), np.float16), "has dtype F16|32-bit integers are expected"),
        ("g_idx", np.full(48, 3, np.int32),
         r"g_idx: the groups are in the order of activations \(desc_act\)"),
        ("g_idx", np.zeros(47, np.int32), r"g_idx is \[47\]"),
        ("scales", np.full((3, 48), np.nan, np.float16), "NaN or Inf"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(
    part: str, value: np.ndarray | None, message: str, checkpoints: Named, tmp_path: Path
) -> None:
    write(checkpoints(BASE), tmp_path / "model", KINDS["gptq"])
    path = tmp_path / "model" / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | {f"{K}.{part}": value}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)

    def export() -> None:
        export_onnx(open_checkpoint(str(tmp_path / "model")), tmp_path / "b", ExportOptions(block=4))

    with pytest.raises((CheckpointError, ExportError), match=message):
        export()


def test_a_zero_point_that_readers_disagree_about_is_refused(checkpoints: Named, tmp_path: Path) -> None:
    """AutoGPTQ stores zero points less one, so that 0 becomes 15: some read 16, some 0."""
    write(checkpoints(BASE), tmp_path / "model", KINDS["gptq-asymmetric"])
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{K}.qzeros"] = np.full_like(tensors[f"{K}.qzeros"], -1)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="16 to some readers of AutoGPTQ"):
        open_checkpoint(str(tmp_path / "model"))
