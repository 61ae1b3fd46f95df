"""What TensorRT-RTX's parser makes of our graphs, without a GPU: the network, and what cannot be one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import onnx
import pytest
from support.engines import BLOCK, CAPACITY, SMALL
from support.fixtures import Named
from support.missing import need

from mars_export import ExportError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph.nodes import fixed
from mars_export.exporter.tensorrt import build as tensorrt
from mars_export.exporter.tensorrt.engines import add_engine, export_engine
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.device.trt.engine import collecting_logger

need("tensorrt_rtx", "rtx")
trt = import_module("tensorrt_rtx")
FAMILIES = ("llama", "qwen2", "qwen3-mixed")
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")


@pytest.mark.parametrize("layout", ["in-place", "appended"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parsed_network_is_the_graph(
    family: str, precision: str, layout: str, graphs: Callable[[str, str, str], Path], tmp_path: Path
) -> None:
    bundle = open_bundle(graphs(family, precision, layout))
    layers, variant = bundle.manifest.model.num_layers, bundle.manifest.variants[0]
    logger = collecting_logger(trt)
    builder = trt.Builder(logger)
    onnx.save(
        fixed(onnx.load(bundle.path / "model.onnx", load_external_data=False), {"capacity": CAPACITY}),
        tmp_path / "fixed.onnx",
    )
    shutil.copy(bundle.path / "weights.bin", tmp_path)
    network = tensorrt.parse(trt, logger, builder, tmp_path / "fixed.onnx")
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    static = layout == "in-place"
    assert kinds.count(trt.LayerType.KV_CACHE_UPDATE) == (2 * layers if static else 0)
    masks = [a.mask is not None for a in tensorrt._attentions(trt, network, kinds)]
    assert masks == [True] * (layers if static else 0), (
        "TensorRT's parser drops nonpad_kv_seqlen: every mask is explicit"
    )
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    assert set(inputs) == {"input_ids", "kv_length", "output_index", *(f"past_key_values.{n}" for n in names)}
    assert set(outputs) == {"token_ids", "confidence", *(f"present.{n}" for n in names)}
    kv = {"float32": trt.float32, "float16": trt.float16, "bfloat16": trt.bfloat16}[variant.kv_dtype]
    assert (
        {inputs[f"past_key_values.{n}"].dtype for n in names}
        == {outputs[f"present.{n}"].dtype for n in names}
        == {kv}
    )
    assert (inputs["input_ids"].dtype, outputs["token_ids"].dtype, outputs["confidence"].dtype) == (
        trt.int64,
        trt.int64,
        trt.float32,
    )
    model = bundle.manifest.model
    assert tuple(inputs["past_key_values.0.key"].shape) == (-1, model.num_kv_heads, CAPACITY, model.head_dim)


def test_a_symbolic_capacity_is_what_tensorrt_refuses(graphs: Callable[[str, str, str], Path]) -> None:
    """Why an engine has an ONNX file of its own: the day this fails, it needs none."""
    logger = collecting_logger(trt)
    with pytest.raises(ExportError, match="must have a static sequence length"):
        tensorrt.parse(trt, logger, trt.Builder(logger), graphs("llama", "fp16", "in-place") / "model.onnx")


def test_a_network_that_lost_something_is_not_built(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        mask, decomposable = None, False

    monkeypatch.setattr(tensorrt, "_attentions", lambda trt, network, kinds: [Dropped()])
    with pytest.raises(
        ExportError,
        match=r"wrongly, so no engine was built: 1 attentions instead of 2; 1 attentions lost their mask",
    ):
        add_engine(open_bundle(small), small, SMALL)


def test_what_tensorrt_cannot_read_is_refused_before_it_is_asked(checkpoints: Named, tmp_path: Path) -> None:
    opened = open_checkpoint(str(checkpoints("llama")))
    with pytest.raises(ExportError, match="w8a8 is computed with integer operators for CPUs"):
        export_engine(opened, tmp_path / "b", ExportOptions(block=BLOCK, precision="w8a8"), SMALL)
    embedded = ExportOptions(block=BLOCK, precision="int8", group=16, allow_drift=True)
    with pytest.raises(ExportError, match="cannot look rows up in an int8 embedding"):
        export_engine(opened, tmp_path / "b", embedded, SMALL)
    export_onnx(opened, tmp_path / "int8", embedded)
    with pytest.raises(ExportError, match="cannot look rows up in an int8 embedding"):
        add_engine(open_bundle(tmp_path / "int8"), tmp_path / "int8", SMALL)
