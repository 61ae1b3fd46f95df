"""Quantized bundles: logits of the decoded weights, rows, widths, stored weights and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.exports import export
from support.fixtures import Exported, Named
from support.graphs import KEPT, Decoded, forward

from mars_export import GenerationConfig, Session, SessionError
from mars_export.exporter.check import reference
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import weight_bytes
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.quantize.quantizer import Quantizer
from mars_export.runtime.bundle.open import open_bundle

BLOCK = 6
PROMPT = [(37 * i) % 250 for i in range(23)]


CHOICES = {
    "int4": {"precision": "int4"},
    "int4-asymmetric": {"precision": "int4", "asymmetric": True},
    "int4-tables": {"precision": "int4", "head": "int4", "embedding": "float"},
    "int8": {"precision": "int8"},
    "int8-plain-tables": {"precision": "int8", "head": "float", "embedding": "float"},
    "w8a8": {"precision": "w8a8", "quantizer": "round"},
    "w8a8-plain-head": {"precision": "w8a8", "head": "float", "quantizer": "round"},
}


@pytest.fixture(scope="module")
def quantized(exported: Exported) -> Callable[[str, str], Path]:
    fields = {"metrics": True, "logits": True, "allow_drift": True, "group": 16}
    return lambda name, choice: exported(name, **fields, **CHOICES[choice])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["llama", "llama-bias"])
def test_logits_are_those_of_the_decoded_weights(
    name: str, choice: str, quantized: Any, checkpoints: Named
) -> None:
    """w8a8 and w4a8 round activations, too."""
    storage = ExportOptions(group=16, **CHOICES[choice]).quantization
    assert storage is not None
    checkpoint = open_checkpoint(str(checkpoints(name)))
    stored, _ = Quantizer("round").prepared(checkpoint, storage, BLOCK, lambda *_: None)
    level = None if storage.is_integer else 0
    found = forward(Session.open(quantized(name, choice), threads=1, accuracy_level=level), PROMPT, ())[-1]
    decoded = Decoded(stored.tensors, storage)
    expected = reference.logits(replace(stored.dims, tied=False), decoded, [PROMPT])[0]
    error = np.abs(found - expected)[:, KEPT].max() / expected.std()
    assert error < (0.2 if storage.is_integer else 1e-3)


@pytest.mark.parametrize("choice", ["w8a8", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mha", "qwen3-mixed"])
def test_predictions_do_not_depend_on_the_width_of_a_step(name: str, choice: str, quantized: Any) -> None:
    """Bit for bit, one slot at a time or all at once: so exact mode and one-token mode are one text here,
    too.
    """
    session = Session.open(quantized(name, choice), threads=1)
    whole = forward(session, PROMPT, ())[-1]
    for width in (1, 2, 3):
        np.testing.assert_array_equal(
            forward(session, PROMPT, tuple(range(width, len(PROMPT), width)))[-1], whole
        )


def test_tied_tables_of_one_form_are_stored_once_and_sizes_are_near_the_bits(
    quantized: Any, checkpoints: Named
) -> None:
    def initializers(choice: str) -> dict[str, onnx.TensorProto]:
        model = onnx.load(quantized("llama", choice) / "model.onnx", load_external_data=False)
        onnx.checker.check_model(str(quantized("llama", choice) / "model.onnx"))
        return {i.name: i for i in model.graph.initializer}

    shared, apart = initializers("int4"), initializers("int4-tables")
    assert shared["embed_tokens.weight"].data_type == onnx.TensorProto.INT8
    for suffix in ("", "_scale"):
        assert place(shared[f"lm_head.weight{suffix}"]) == place(shared[f"embed_tokens.weight{suffix}"])
    assert apart["lm_head.weight"].data_type == onnx.TensorProto.INT4
    assert apart["embed_tokens.weight"].data_type == onnx.TensorProto.FLOAT
    checkpoint = open_checkpoint(str(checkpoints("llama")))
    for choice in CHOICES:
        options = ExportOptions(group=16, **CHOICES[choice])
        expected = weight_bytes(checkpoint, options)
        stored = {
            place(i) for i in initializers(choice).values() if i.data_location == onnx.TensorProto.EXTERNAL
        }
        assert expected == sum(length for _, length in stored), choice


def place(weight: onnx.TensorProto) -> tuple[int, int]:
    """Offset and length of a weight in the weights file."""
    found = {e.key: e.value for e in weight.external_data}
    return int(found["offset"]), int(found["length"])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["llama", "llama-bias"])
def test_onnx_runtime_has_a_kernel_for_every_quantized_product(
    name: str, choice: str, quantized: Any, tmp_path: Path
) -> None:
    # A DequantizeLinear that is left over decodes a whole matrix in every step: the tokens are right and the
    # step takes ten times as long.
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(
        quantized(name, choice) / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    kernels = Counter(
        node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    )
    quantization = ExportOptions(group=16, **CHOICES[choice]).quantization
    assert quantization is not None
    products = 4 * open_bundle(quantized(name, choice)).manifest.model.num_layers + (
        quantization.head != "float"
    )
    assert kernels["MatMulIntegerToFloat" if quantization.is_integer else "MatMulNBits"] == products
    assert kernels["DequantizeLinear"] == 0


def test_the_manifest_says_how_the_weights_are_stored(quantized: Any) -> None:
    variant = open_bundle(quantized("llama", "int4-asymmetric")).manifest.variants[0]
    assert (variant.precision, variant.kv_dtype, variant.accuracy_level) == ("int4", "float32", 4)
    assert variant.quantization is not None
    assert (variant.quantization.group_size, variant.quantization.symmetric, variant.quantization.head) == (
        16,
        False,
        "int8",
    )
    assert variant.drift is not None
    w8a8 = open_bundle(quantized("llama", "w8a8")).manifest.variants[0]
    assert w8a8.accuracy_level is None
    assert w8a8.is_batch_invariant and not variant.is_batch_invariant


def test_int4_in_half_precision_keeps_half_precision_kv(checkpoints: Named, tmp_path: Path) -> None:
    options = ExportOptions(block=4, precision="int4", activations="fp16", group=16, allow_drift=True)
    manifest = export(checkpoints("qwen2"), tmp_path / "b", options)
    assert (manifest.variants[0].precision, manifest.variants[0].kv_dtype) == ("int4", "float16")
    assert (
        Session.open(tmp_path / "b", threads=1).generate(PROMPT, GenerationConfig(max_new_tokens=5)).token_ids
    )


def test_an_accuracy_level_is_for_weights_that_have_one(quantized: Any, bundles: Named) -> None:
    with pytest.raises(SessionError, match="is float32: an accuracy level is for int4 and int8"):
        Session.open(bundles("llama"), accuracy_level=0)
    with pytest.raises(SessionError, match="is w8a8: an accuracy level"):
        Session.open(quantized("llama", "w8a8"), accuracy_level=0)
    with pytest.raises(SessionError, match="must be one of 0, 1, 2, 3, 4, not 9"):
        Session.open(quantized("llama", "int4"), accuracy_level=9)
