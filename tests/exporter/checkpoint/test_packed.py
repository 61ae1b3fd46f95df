"""Checkpoints that are quantized already: their codes must reach the graph unchanged, and what does not fit
is refused by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file
from support import tiny
from support.exports import export
from support.fixtures import Named

from mars_export import CheckpointError, ExportError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.packed import read_form, require_same_form
from mars_export.exporter.codes import Quantization
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions

Codes = dict[
    str, tuple[np.ndarray, np.ndarray, np.ndarray | None]
]  # codes [out, in] unsigned, scales and zeros [out, blocks]
FORMS = {"int4": (4, True), "uint4": (4, False), "int8": (8, True), "uint8": (8, False)}
K, BLOCK = "model.layers.0.self_attn.k_proj.weight", 16
PLAIN = ExportOptions(block=4, group=BLOCK, head="float", embedding="float", accuracy_level=0)


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Rows of unsigned fields as int32 words, the first field in the lowest bits: written out as one long
    number a row.
    """
    count = -(-fields.shape[1] * bits // 32)
    rows = [
        sum(int(f) << (bits * i) for i, f in enumerate(row)).to_bytes(4 * count, "little") for row in fields
    ]
    return np.frombuffer(b"".join(rows), "<i4").reshape(len(rows), count).copy()


def config(bits: int, symmetric: bool, size: int = BLOCK) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": size}, "input_activations": None}
    kind = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def pack(source: Path, target: Path, form: str) -> Codes:
    """Write a copy of a checkpoint whose Linear weights are random codes; blocks need not use the ends of
    their range.
    """
    bits, symmetric = FORMS[form]
    shutil.copytree(source, target)
    tensors, codes, random = load_file(source / "model.safetensors"), Codes(), np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        fields = random.integers(2, (1 << bits) - 2, (outputs, inputs))
        scales = random.uniform(0.5, 1.5, (outputs, inputs // BLOCK)).astype(np.float16) * np.float16(
            1.2 / (1 << bits)
        )
        zeros = (
            None if symmetric else random.integers((1 << (bits - 1)) - 2, (1 << (bits - 1)) + 3, scales.shape)
        )
        codes[name] = (fields, scales.astype(np.float32), zeros)
        tensors |= {
            f"{name}_packed": words(fields, bits),
            f"{name}_scale": scales,
            f"{name}_shape": np.array([outputs, inputs]),
        }
        if zeros is not None:
            tensors[f"{name}_zero_point"] = words(zeros.T, bits).T.copy()
    save_file(tensors, target / "model.safetensors")
    tiny.change_config(target, quantization_config=config(bits, symmetric))
    return codes


def rewrite(checkpoint: Path, **parts: np.ndarray | None) -> None:
    """Replace parts of one packed weight; None removes a part."""
    tensors = load_file(checkpoint / "model.safetensors") | {
        f"{K}_{part}": value for part, value in parts.items()
    }
    save_file(
        {name: value for name, value in tensors.items() if value is not None},
        checkpoint / "model.safetensors",
    )


@pytest.fixture(scope="module")
def packed(
    checkpoints: Named, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Codes]]:
    root, made = tmp_path_factory.mktemp("packed"), {}

    def one(form: str) -> tuple[Path, Codes]:
        if form not in made:
            made[form] = (root / form, pack(checkpoints("llama"), root / form, form))
        return made[form]

    return one


@pytest.mark.parametrize("form", FORMS)
def test_codes_reach_the_graph_unchanged(form: str, packed: Any, tmp_path: Path) -> None:
    directory, codes = packed(form)
    bits, symmetric = FORMS[form]
    middle = 1 << (bits - 1) if symmetric else 0
    checkpoint = open_checkpoint(str(directory))
    for name, (fields, scales, zeros) in codes.items():
        expected = (fields - (middle if zeros is None else np.repeat(zeros, BLOCK, 1))).astype(
            np.float32
        ) * np.repeat(scales, BLOCK, 1)
        assert (checkpoint.tensors.read(name) == expected).all()
    exact = replace(PLAIN, precision=f"int{bits}", asymmetric=not symmetric)
    drift = export_onnx(checkpoint, tmp_path / "b", exact).variants[0].drift
    assert drift is not None
    assert drift.argmax_matches == drift.positions
    assert drift.max_logit_error < 1e-3  # nothing was rounded: torch ran the decoded weights
    initializers = {i.name: i for i in onnx.load(tmp_path / "b" / "model.onnx").graph.initializer}
    parts = [codes[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    stored = numpy_helper.to_array(initializers["layers.1.qkv.weight"]).astype(np.int64)
    assert (stored == np.concatenate([fields for fields, _, _ in parts]).T - middle).all()
    assert (
        numpy_helper.to_array(initializers["layers.1.qkv.weight_scale"])
        == np.concatenate([scales for _, scales, _ in parts]).T
    ).all()


@pytest.mark.parametrize("precision", ["fp32", "w8a8", "int8"])
def test_a_wider_bundle_may_be_made_of_codes(precision: str, packed: Any, tmp_path: Path) -> None:
    options = replace(PLAIN, precision=precision, allow_drift=True)
    drift = export(packed("uint4")[0], tmp_path / "b", options).variants[0].drift
    assert drift is not None
    assert drift.argmax_matches >= (1.0 if precision == "fp32" else 0.85) * drift.positions


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        (
            "uint4",
            {},
            "are uint4 codes in groups of 16 and would be rounded a second time: export with --precision int4"
            " --group 16 --asymmetric",
        ),
        (
            "int4",
            {"asymmetric": True},
            "are int4 codes in groups of 16 .*: export with --precision int4 --group 16, or",
        ),
    ],
)
def test_codes_are_not_rounded_a_second_time(
    form: str, options: dict[str, Any], message: str, packed: Any, tmp_path: Path
) -> None:
    asked = {"precision": "int4", "group": BLOCK} | options
    with pytest.raises(ExportError, match=message):
        export(packed(form)[0], tmp_path / "b", block=4, **asked)
    assert not (tmp_path / "b").exists()


def test_codes_of_4_bits_are_not_kept_by_w4a8_nor_rounded_again(packed: Any) -> None:
    """Its groups have integers times a scale of the channel, which those of other methods are not."""
    checkpoint = open_checkpoint(str(packed("uint4")[0]))
    with pytest.raises(ExportError, match="would be rounded a second time: export with --precision int4"):
        require_same_form(checkpoint.tensors, checkpoint.dims, Quantization("w4a8"))


def test_layers_kept_in_full_precision_are_not_rounded_silently(packed: Any, tmp_path: Path) -> None:
    directory, _ = packed("int4")
    shutil.copytree(directory, tmp_path / "c")
    rewrite(tmp_path / "c", packed=None, scale=None, shape=None)
    tensors = load_file(tmp_path / "c" / "model.safetensors") | {K: np.ones((24, 48), np.float32)}
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    with pytest.raises(
        ExportError, match=f"keeps 1 Linear weights unquantized, and an int4 bundle would round them: {K}"
    ):
        export(tmp_path / "c", tmp_path / "b", block=4, precision="int4", group=BLOCK)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"scale": None}, f"{K}_scale: missing"),
        ({"zero_point": None}, f"{K}_zero_point: missing"),
        ({"shape": None}, f"{K}_shape: two positive integers are expected"),
        ({"shape": np.array([24, 0])}, "two positive integers"),
        ({"shape": np.array([24, 40])}, f"{K}: its 40 inputs cannot be in groups of 16"),
        ({"shape": np.array([1 << 40, 1 << 20])}, r"_packed is \[24, 6\], uint4 codes of 1099511627776 x "),
        ({"packed": np.zeros((24, 5), np.int32)}, r"\[24, 5\], uint4 codes of 24 x 48 in groups of 16 need "),
        ({"packed": np.zeros((24, 6), np.float32)}, f"{K}_packed: 32-bit integers are expected"),
        ({"scale": np.ones((24, 1), np.float16)}, r"_scale is \[24, 1\].*need \[24, 3\]"),
        ({"packed": None}, f"{K}_scale: there are no codes for it"),
        ({"g_idx": np.zeros(48, np.int32)}, f"{K}_g_idx: the groups are not runs of consecutive inputs"),
        ({"shape": np.array([16, 48]), "packed": np.zeros((16, 6), np.int32), "scale": np.ones((16, 3)),
          "zero_point": np.zeros((2, 3), np.int32)},
         rf"misshapen: {K} is \[16, 48\], config.json implies \[24, 48\]"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(
    parts: dict[str, Any], message: str, packed: Any, tmp_path: Path
) -> None:
    shutil.copytree(packed("uint4")[0], tmp_path / "c")
    rewrite(tmp_path / "c", **parts)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "c"))


def test_scales_must_be_numbers_and_weights_floats(packed: Any, tmp_path: Path) -> None:
    shutil.copytree(packed("int4")[0], tmp_path / "c")
    rewrite(tmp_path / "c", scale=np.full((24, 3), np.nan, np.float16))
    with pytest.raises(CheckpointError, match=f"tensor `{K}, its scales` holds NaN"):
        export(tmp_path / "c", tmp_path / "b", block=4, precision="int4", group=BLOCK)
    tensors = load_file(tmp_path / "c" / "model.safetensors") | {"model.norm.weight": np.ones(48, np.int32)}
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"`model.norm.weight` has dtype I32; known are F64"):
        open_checkpoint(str(tmp_path / "c"))


def test_a_symmetric_checkpoint_has_no_zero_points_and_a_packed_one_has_codes(
    packed: Any, checkpoints: Named, tmp_path: Path
) -> None:
    shutil.copytree(packed("uint4")[0], tmp_path / "c")
    tiny.change_config(tmp_path / "c", quantization_config=config(4, True))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)14 parts .*zero_point: config.json says the codes are symmetric.*and 2 more",
    ):
        open_checkpoint(str(tmp_path / "c"))
    shutil.copytree(checkpoints("llama"), tmp_path / "plain")
    tiny.change_config(tmp_path / "plain", quantization_config=config(4, True))
    with pytest.raises(CheckpointError, match="says the weights are packed, but there is no"):
        open_checkpoint(str(tmp_path / "plain"))


BAD_SCHEMES = [
    (
        {"quant_method": "hqq", "bits": 4},
        "quantized in an unsupported form: hqq; export the original checkpoint, or quantize it with",
    ),
    (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        "unsupported form: compressed-tensors int-quantized",
    ),
    ([1], "must be an object"),
    (config(4, True) | {"config_groups": {}}, "must have one group with"),
    (config(4, True) | {"config_groups": {"a": 1}}, "must have one group with"),
    (config(4, True) | {"config_groups": {"a": {}, "b": {}}}, "must have one group with"),
    (config(4, True) | {"config_groups": {"a": {"weights": None}}}, "must have one group with"),
    (
        config(3, True, 20),
        r"weights of 3 bits of type 'int' \(known: int of 4 or 8\);"
        r" strategy 'group' with group_size 20 \(known: group, 16, 32",
    ),
    (
        config(4, True) | {"kv_cache_scheme": {"num_bits": 8}, "transform_config": {"R1": 1}},
        "a `kv_cache_scheme`; a `transform_config`",
    ),
    (config(4, "yes"), "`symmetric` is 'yes'"),  # type: ignore[arg-type]
    (
        config(4, True) | {"config_groups": {"a": {"weights": {}, "input_activations": {"num_bits": 8}}}},
        "quantized activations",
    ),
    ({}, None),
    (None, None),
]


@pytest.mark.parametrize(("raw", "message"), BAD_SCHEMES, ids=str)
def test_other_forms_are_refused(raw: object, message: str | None, tmp_path: Path) -> None:
    settings = {"quantization_config": raw}
    if message is None:
        assert read_form(tmp_path, settings) is None
        return
    with pytest.raises(CheckpointError, match=message):
        read_form(tmp_path, settings)
