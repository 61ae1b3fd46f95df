"""LayerStart and LayerEnd of mars-export-kernels have the bits of their functions' standard nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support import tiny
from support.fixtures import Named

from mars_export import Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph import fused
from mars_export.exporter.graph.operators import GROUPED, PRODUCT
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.device.ort import kernels
from mars_export.runtime.device.ort.library import open_session

FITTING = {"llama": True, "qwen2": True, "qwen2-mha": True, "llama-bias": False, "qwen3": False}
WIDTHS = (1, 2, 3, 8, 9, 19, 70)


@pytest.fixture(scope="module")
def w8a8(tmp_path_factory: pytest.TempPathFactory) -> Named:
    root = tmp_path_factory.mktemp("layers")

    def exported(name: str) -> Path:
        if not (root / name).exists():
            is_grouped = name == GROUPED
            options = ExportOptions(
                block=6, precision="w4a8" if is_grouped else "w8a8", quantizer="round", allow_drift=True
            )
            plain = tiny.WIDE if is_grouped else tiny.TINIES[name]
            settings = {**plain.settings, "intermediate_size": tiny.WIDE.settings["intermediate_size"]}
            source = tiny.write(replace(plain, settings=settings), root / f"{name}-checkpoint")
            export_onnx(open_checkpoint(str(source)), root / name, options)
        return root / name

    return exported


def steps(bundle: Path, threads: int) -> list[np.ndarray]:
    """Logits of two steps of two rows, at several widths; the second one reads KV entries of the first."""
    backend = Session.open(bundle, threads=threads, cache_bytes=0).backend
    draw, found = np.random.default_rng(0), []
    for width in WIDTHS:
        cache = backend.new_cache(2)
        cache.reserve(2 * width)
        index = np.tile(np.arange(width), (2, 1))
        for length in (0, width):
            ids = draw.integers(20, 200, (2, width))
            output = backend.step(cache, 0, StepInput(ids, np.full(2, length), index), True)
            assert output.logits is not None
            found.append(output.logits)
    return found


@pytest.mark.parametrize("name", [*FITTING, GROUPED])
@pytest.mark.usefixtures("instructions")
def test_steps_have_the_bits_of_the_standard_nodes(
    name: str, w8a8: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = [steps(w8a8(name), threads) for threads in (1, 2)]
    monkeypatch.setenv(kernels.VARIABLE, kernels.OFF)
    for expected, *others in zip(steps(w8a8(name), 1), *fast, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize("name", FITTING)
def test_the_operators_replace_all_nodes_of_layers_that_fit(
    name: str, w8a8: Named, instructions: kernels.Kernels, tmp_path: Path
) -> None:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(instructions.library))
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    graph = w8a8(name) / "model.onnx"
    onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    kinds = {n.op_type for n in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node}
    assert PRODUCT in kinds  # the head's
    assert (kinds >= {fused.START, fused.END}) == FITTING[name]
    assert ("RotaryEmbedding" in kinds) != FITTING[name]


def swap(node: onnx.NodeProto, first: int, second: int) -> None:
    node.input[first], node.input[second] = node.input[second], node.input[first]


@pytest.mark.parametrize(
    ("op", "spoil", "problem"),
    [
        (fused.START, lambda node: set_heads(node, 0), "must be positive"),
        (fused.START, lambda node: set_heads(node, 5), r"must have num_heads \+ 2 num_kv_heads heads"),
        (fused.START, lambda node: swap(node, 2, 3), "must be initializers|weight must be|[Tt]ype"),
        (fused.START, lambda node: swap(node, 1, 6), r"bias must be \[outputs\]|[Ss]cale"),
        (fused.END, lambda node: (swap(node, 2, 7), swap(node, 3, 8)), "must fit together"),
        (fused.END, lambda node: swap(node, 3, 6), r"scale \[outputs\]"),
    ],
)
def test_a_wrong_graph_is_an_error(
    op: str,
    spoil: Callable[[onnx.NodeProto], object],
    problem: str,
    w8a8: Named,
    instructions: kernels.Kernels,
    tmp_path: Path,
) -> None:
    shutil.copytree(w8a8("qwen2"), tmp_path / "wrong")
    graph = tmp_path / "wrong" / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    spoil(next(node for node in model.graph.node if node.op_type == op))
    onnx.save(model, graph)
    with pytest.raises(Exception, match=problem):  # onnxruntime raises its own classes
        run_once(graph, instructions.library)


def run_once(graph: Path, operators: Path) -> None:
    session = open_session(onnxruntime, graph, ["CPUExecutionProvider"], {}, threads=1, operators=operators)
    types = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
    sizes = {"batch": 1, "slots": 2, "outputs": 1, "capacity": 4}
    inputs = ((x.name, [sizes.get(size, size) for size in x.shape], x.type) for x in session.get_inputs())
    session.run(None, {name: np.zeros(shape, types[kind]) for name, shape, kind in inputs})


def set_heads(node: onnx.NodeProto, number: int) -> None:
    next(a for a in node.attribute if a.name == "num_heads").i = number
