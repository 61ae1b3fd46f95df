"""The spike of hybrids: exact mode gives transformers' text, and a state never holds a guess."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from support.missing import lacking, need

need("transformers", "export")
from spikes.hybrid import graph, run  # noqa: E402

if not any(schema.name == "LinearAttention" for schema in get_all_operator_schema()):
    lacking(f"ONNX Runtime {ort.__version__} has no LinearAttention: pip install 'onnxruntime>=1.32'")


@pytest.mark.parametrize("layers", ["lf", "fll"])
def test_text_of_a_ragged_batch_is_that_of_transformers(layers: str) -> None:
    found = run.compare(layers, 3, (3, 40, 1), 40)
    assert found.equal == found.texts == 3
    assert found.tokens / found.forwards > 1.5, "drafts were accepted"
    assert {1, 2, 3, 16} <= found.catch_ups, "states caught up by chunks of prompts and by accepted drafts"


def test_a_slot_without_gates_leaves_the_state_bit_for_bit() -> None:
    draw = np.random.default_rng(0)
    names = ("q", "k", "v", "past", "decay", "beta")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (*names, "o", "state")]
    node = helper.make_node(
        graph.LINEAR, names, ["o", "state"], domain="com.microsoft", q_num_heads=2, kv_num_heads=2
    )
    made = helper.make_graph([node], "operator", values[:6], values[6:])
    opsets = [helper.make_opsetid(*item) for item in graph.OPSETS.items()]
    model = helper.make_model(made, opset_imports=opsets, ir_version=graph.IR_VERSION)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sizes = [(1, 7, 64)] * 3 + [(1, 2, 32, 32)] + [(1, 7, 2)] * 2
    feeds = dict(zip(names, (draw.standard_normal(size, np.float32) for size in sizes), strict=True))
    feeds["k"] /= 8
    three = {name: x if name == "past" else x[:, :3] for name, x in feeds.items()}
    padded = feeds | {name: np.where(np.arange(7)[:, None] < 3, feeds[name], 0) for name in ("decay", "beta")}
    outputs, state = session.run(None, three)
    wide, same = session.run(None, padded)
    np.testing.assert_array_equal(state, same)
    np.testing.assert_array_equal(outputs, wide[:, :3])
