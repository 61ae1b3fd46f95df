"""The nodes of quantized graphs on their own: the integer product, and the best logit in one pass or two."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from support import tiny
from support.fixtures import Named

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.codes import in_panels
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph import operators
from mars_export.exporter.graph.nodes import Nodes
from mars_export.exporter.graph.operators import integer_product
from mars_export.exporter.graph.spec import GraphSpec
from mars_export.exporter.graph.step import Writer


def run_nodes(nodes: Nodes, opset: int, plans: dict[str, np.ndarray], *outputs: str) -> list[np.ndarray]:
    """A graph of a few nodes on its own."""
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in plans.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes.nodes, "few", infos, results, [*nodes.constants.values()])
    functions = [*nodes.functions.values()]
    domains = {"": opset} | {function.domain: 1 for function in functions}
    opsets = [helper.make_opsetid(*item) for item in domains.items()]
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    made: list[np.ndarray] = session.run(list(outputs), plans)
    return made


def test_rows_of_zeros_and_of_the_smallest_numbers_have_their_products() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(0, 1, (1, 6, 32)).astype(np.float32)
    x[0, 1] = 0
    x[0, 2] *= np.float32(1e-37)
    x[0, 3] *= np.float32(1e30)
    x[0, 5] = -0.0
    codes = draw.integers(-63, 64, (32, 8)).astype(np.int8)
    scales = np.full(8, 0.01, np.float32)
    nodes = Nodes()
    nodes.add("Identity", integer_product(nodes, "x", "w", "product", 24), name="y")
    [y] = run_nodes(nodes, 24, {"x": x, "w": in_panels(codes), "w_scale": scales}, "y")
    exact = x @ (codes * scales)
    assert (y[0, 1] == 0).all() and (y[0, 5] == 0).all()
    for row in (0, 2, 3, 4):
        assert np.abs(y[0, row] - exact[0, row]).max() < 0.02 * np.abs(exact[0, row]).max()


def test_the_best_logit_is_the_same_in_one_pass_or_two(checkpoints: Named) -> None:
    dims = open_checkpoint(str(checkpoints("llama"))).dims
    for kind in ("fp32", "fp16"):
        options = ExportOptions(block=4, precision="int8", activations=kind)
        assert Writer(GraphSpec(dims, options, tiny.MASK)).is_batch_invariant == (kind == "fp32")
    logits = np.random.default_rng(0).integers(0, 9, (2, 7, 288)).astype(np.float32)  # many equal ones
    logits[0, 0] = -1e9
    found = {}
    for in_one_pass in (True, False):
        nodes = Nodes()
        operators.write_predictions(nodes, "logits", False, 0, in_one_pass=in_one_pass)
        kinds = {node.op_type for node in nodes.nodes}
        assert ("TopK" in kinds) == in_one_pass != ("ArgMax" in kinds)
        found[in_one_pass] = run_nodes(nodes, 24, {"logits": logits}, "token_ids", "confidence")
    for one, two in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (found[True][0] == logits.argmax(-1)).all()
