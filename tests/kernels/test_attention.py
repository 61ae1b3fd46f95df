"""mars-export-kernels: attention over int8 entries has the bits of the standard nodes, with every instruction
set of this processor.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support.attention import Heads, Step, run, write_graph
from support.fixtures import Named

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph.int8_kv import ATTENTION
from mars_export.runtime.device.ort import kernels

SIZES = (
    Heads(9, 3, 64),
    Heads(4, 4, 16, window=5),
    Heads(4, 1, 80),
    Heads(8, 2, 128, window=40),
    Heads(2, 1, 8, window=3),
    Heads(3, 1, 36),
    Heads(32, 1, 32, window=70),
)
# slots, capacity, kv_length of two rows
STEPS = ((1, 64, [0, 63]), (3, 64, [5, 17]), (40, 64, [0, 24]), (7, 1300, [1290, 3]), (2, 5000, [4900, 4998]))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_is_that_of_the_standard_nodes(
    instructions: kernels.Kernels, sizes: Heads, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    graph = write_graph(tmp_path / "graph.onnx", sizes)
    for threads, (slots, capacity, kv_length) in enumerate(STEPS, 1):
        step = Step.drawn(draw, sizes, slots, capacity, kv_length)
        step.q[0, 0, 0] = step.k[0, 0, -1] = step.v[1, 0, 0] = 0
        step.k[1, 0, 0] *= np.float32(1e20)
        step.v[0, 0, -1] *= np.float32(1e-38)
        found = run(graph, step, instructions.library, 1 + threads % 2)
        for array, exact in zip(found, run(graph, step), strict=True):
            np.testing.assert_array_equal(array, exact)


def test_sums_of_many_entries_are_exact(instructions: kernels.Kernels, tmp_path: Path) -> None:
    sizes = Heads(2, 1, 16)
    step = Step.drawn(np.random.default_rng(0), sizes, 9, 70_000, [69_900])
    step.q[...] = step.v[...] = 0  # every entry has the largest weight
    step.value[...] = 127
    step.value[..., sizes.head_dim :] = 0
    graph = write_graph(tmp_path / "graph.onnx", sizes)
    for array, exact in zip(run(graph, step, instructions.library), run(graph, step), strict=True):
        np.testing.assert_array_equal(array, exact)


@pytest.mark.parametrize("kv_length", [[-1, 0], [0, 7], [2**62, 0]])
def test_slots_beyond_the_memory_are_an_error(
    instructions: kernels.Kernels, kv_length: list[int], tmp_path: Path
) -> None:
    sizes = Heads(2, 1, 16)
    step = Step.drawn(np.random.default_rng(0), sizes, 2, 8, [0, 0])
    graph = write_graph(tmp_path / "graph.onnx", sizes)
    with pytest.raises(Exception, match="kv_length and the slots must be within the capacity"):
        run(graph, replace(step, kv_length=np.array(kv_length)), instructions.library)


@pytest.mark.parametrize("name", ["scale", "window"])
def test_an_empty_number_is_an_error(instructions: kernels.Kernels, name: str, tmp_path: Path) -> None:
    """Nothing is read from a tensor without elements."""
    sizes = Heads(2, 1, 16)
    step = Step.drawn(np.random.default_rng(0), sizes, 2, 8, [0, 0])
    model = onnx.load(write_graph(tmp_path / "graph.onnx", sizes))
    call = next(node for node in model.graph.node if node.op_type == "Attention")
    place = {"scale": 6, "window": 7}[name]
    number = next(each for each in model.graph.initializer if each.name == call.input[place])
    empty = np.zeros(0, onnx.numpy_helper.to_array(number).dtype)
    number.CopyFrom(onnx.numpy_helper.from_array(empty, number.name))
    onnx.save(model, tmp_path / "graph.onnx")
    with pytest.raises(Exception, match="scale and window are one number each"):
        run(tmp_path / "graph.onnx", step, instructions.library)


def test_a_row_of_nonsense_leaves_other_rows_as_they_are(
    instructions: kernels.Kernels, tmp_path: Path
) -> None:
    sizes = Heads(2, 1, 16)
    step = Step.drawn(np.random.default_rng(0), sizes, 3, 8, [4, 3])
    graph = write_graph(tmp_path / "graph.onnx", sizes)
    exact, _, _ = run(graph, step)
    step.q[0, 0, 1], step.k[0, 0, 0], step.v[0, 0, 2] = np.nan, np.inf, np.nan
    step.key[0, 0, 1:], step.value[0, 0, 2:] = -128, 127
    y, _, _ = run(graph, step, instructions.library)
    np.testing.assert_array_equal(y[1], exact[1])


def test_the_operator_replaces_all_standard_nodes(instructions: kernels.Kernels, tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "graph.onnx", Heads(2, 1, 16))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(instructions.library))
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    session.run(None, Step.drawn(np.random.default_rng(0), Heads(2, 1, 16), 2, 8, [0]).feeds)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = {event["args"]["op_name"] for event in events if "op_name" in event.get("args", {})}
    assert nodes == {ATTENTION}


@pytest.mark.usefixtures("instructions")
def test_a_bundle_has_the_same_steps_with_and_without(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExportOptions(block=6, precision="w8a8", kv="int8")
    export_onnx(open_checkpoint(str(checkpoints("llama"))), tmp_path / "int8", options)
    config = GenerationConfig(max_new_tokens=24, tau=0.3)

    def answer() -> tuple[list[int], list[float]]:
        completion = Session.open(tmp_path / "int8", threads=1, cache_bytes=0).generate([5, 17, 99], config)
        return completion.token_ids, completion.confidences

    found = answer()
    monkeypatch.setenv(kernels.VARIABLE, kernels.OFF)
    assert found == answer()
