"""What TensorRT-RTX's parser makes of our graphs, without a GPU: the network, and what cannot be one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import onnx
import pytest
from onnx.numpy_helper import to_array
from support.engines import BLOCK, CAPACITY, SMALL, graph_options
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
    graph = fixed(onnx.load(bundle.path / "model.onnx", load_external_data=False), {"capacity": CAPACITY})
    numbers = [to_array(c) for c in graph.graph.initializer if c.data_type == onnx.TensorProto.INT64]
    assert all(abs(values).max(initial=0) < 2**31 for values in numbers), "TensorRT may narrow them"
    onnx.save(graph, tmp_path / "fixed.onnx")
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
    h200 = replace(SMALL, target="h200")
    with pytest.raises(
        ExportError, match="the TensorRT of h200 reads no int8 weights in groups.*int4 or fp16"
    ):
        export_engine(opened, tmp_path / "b", graph_options("int8"), h200)
    export_onnx(opened, tmp_path / "codes", graph_options("int8"))
    with pytest.raises(ExportError, match="the TensorRT of h200 reads no int8 weights in groups"):
        add_engine(open_bundle(tmp_path / "codes"), tmp_path / "codes", h200)
    export_onnx(opened, tmp_path / "zeros", graph_options("int4", asymmetric=True))
    for target in ("h200", "sm86"):
        with pytest.raises(ExportError, match="zero points, which TensorRT does not read"):
            add_engine(open_bundle(tmp_path / "zeros"), tmp_path / "zeros", replace(SMALL, target=target))


@pytest.mark.parametrize("head", ["float", "int8", "int4"])
def test_a_jetson_gets_graphs_in_both_layouts_with_groups_of_int4_only(
    head: str, checkpoints: Named, tmp_path: Path
) -> None:
    opened = open_checkpoint(str(checkpoints("llama")))
    orin = replace(SMALL, target="jetson-orin")
    export_engine(opened, tmp_path / "b", graph_options("int4", head=head), orin)
    before = open_bundle(tmp_path / "b", full=True).manifest
    assert [(v.name, v.kv_layout) for v in before.variants] == [
        ("model", "in-place"),
        ("model-appended", "appended"),
    ]
    assert all(v.drift is not None and v.weights == "weights.bin" for v in before.variants)
    add_engine(open_bundle(tmp_path / "b"), tmp_path / "b", orin)
    assert open_bundle(tmp_path / "b", full=True).manifest == before, "a bundle gives the same recipe"
    for variant in before.variants:
        graph = onnx.load(tmp_path / "b" / variant.file, load_external_data=False).graph
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        decoded = [node for node in graph.node if node.op_type == "DequantizeLinear"]
        sizes = [next(a.i for a in node.attribute if a.name == "block_size") for node in decoded]
        grouped = {types[node.input[0]] for node, size in zip(decoded, sizes, strict=True) if size}
        assert grouped == {onnx.TensorProto.INT4}, "the only groups that full TensorRT decodes"
