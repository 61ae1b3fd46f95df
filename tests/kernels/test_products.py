"""mars-export-kernels: its products have the bits of the standard nodes, with every instruction set of this
processor. `make kernels` builds the package; without it these tests are skipped.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from support.fixtures import Named
from support.paths import BUILT_KERNELS

from mars_export import GenerationConfig, Session, SessionError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.codes import Quantization, in_grouped_panels, in_panels
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph.nodes import Nodes
from mars_export.exporter.graph.operators import DOMAIN, PRODUCT, grouped_product, integer_product
from mars_export.runtime.cli import doctor
from mars_export.runtime.device.ort import kernels
from mars_export.runtime.device.ort.kernels import UNSIGNED
from mars_export.runtime.device.ort.library import open_session

SHAPES = [(1, 1), (3, 5), (8, 8), (17, 33), (64, 48), (130, 100), (576, 65)]


def write_product(path: Path, weight: np.ndarray, scale: np.ndarray) -> Path:
    """A graph of one product, x [1, rows, inputs] -> y."""
    return save_panels(path, in_panels(weight), scale)


def save_panels(path: Path, panels: np.ndarray, scale: np.ndarray) -> Path:
    nodes = Nodes()
    y = (
        integer_product(nodes, "x", "w", "product", 24)
        if panels.dtype == np.int8
        else grouped_product(nodes, "x", "w", Quantization("w4a8").linear, "product", 24)
    )
    nodes.add("Identity", y, name="y")
    weights = [numpy_helper.from_array(panels, "w"), numpy_helper.from_array(scale, "w_scale")]
    graph = helper.make_graph(
        nodes.nodes,
        "product",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, "rows", "inputs"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, "rows", "outputs"])],
        weights,
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        graph, functions=[*nodes.functions.values()], opset_imports=opsets, ir_version=11
    )
    onnx.save(model, path)
    return path


@dataclass(frozen=True)
class FourBits:
    """A weight of `mars_export.GroupedMatMul`: codes [in, out], zero points, multipliers [in / 32, out]."""

    codes: np.ndarray
    zero_points: np.ndarray
    multipliers: np.ndarray
    scale: np.ndarray

    @classmethod
    def random(cls, inputs: int, outputs: int) -> FourBits:
        draw, groups = np.random.default_rng(0), inputs // 32
        return cls(
            draw.integers(0, 16, (inputs, outputs)),
            draw.integers(0, 16, (groups, outputs)),
            draw.integers(1, 1 + min(255, 2**31 // (127 * 15 * inputs)), (groups, outputs)),
            draw.uniform(0.001, 0.1, outputs).astype(np.float32),
        )

    def integers(self) -> np.ndarray:
        repeated = (np.repeat(numbers, 32, 0) for numbers in (self.multipliers, self.zero_points))
        multipliers, zero_points = repeated
        return multipliers * (self.codes - zero_points)

    def in_panels(self) -> np.ndarray:
        return in_grouped_panels(self.codes, self.zero_points, self.multipliers)

    def write(self, path: Path) -> Path:
        """A graph of one product, x [1, rows, inputs] -> y."""
        return save_panels(path, self.in_panels(), self.scale)


def run(graph: Path, x: np.ndarray, operators: Path | None, threads: int) -> np.ndarray:
    session = open_session(
        onnxruntime, graph, ["CPUExecutionProvider"], UNSIGNED, threads=threads, operators=operators
    )
    [y] = session.run(None, {"x": x[None]})
    return np.asarray(y[0])


def slow_product(x: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The operations of the standard nodes, one after the other."""
    step = np.float32(1 / 127)
    with np.errstate(invalid="ignore"):
        largest = np.abs(x).max(1, keepdims=True)
        units = np.rint(x / largest / step)
        codes = np.where(np.isnan(units), -128, units).astype(np.int64)  # 0 / 0 has the lowest code
        return (codes @ weight.astype(np.int64)).astype(np.float32) * (scale * step) * largest


@pytest.mark.parametrize("most", [63, 127])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_product_is_that_of_the_standard_nodes(
    instructions: kernels.Kernels, shape: tuple[int, int], most: int, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    weight = draw.integers(-most, most + 1, shape).astype(np.int8)
    weight[:, 0] = most  # with the highest codes this is the largest sum
    weight[:, -1] = -most
    scale = draw.uniform(0.001, 0.1, shape[1]).astype(np.float32)
    graph = write_product(tmp_path / "product.onnx", weight, scale)
    for rows in (1, 2, 3, 6, 7, 10, 11, 15, 29, 40):
        x = draw.normal(0, 1, (rows, shape[0])).astype(np.float32)
        x[0] = 1
        x[rows // 2] = 0
        x[-1] *= np.float32(1e-37)
        y = run(graph, x, instructions.library, threads=1 + rows % 2)
        np.testing.assert_array_equal(y, slow_product(x, weight, scale))
        np.testing.assert_array_equal(y, run(graph, x, None, threads=1))


GROUPED_SHAPES = [(32, 1), (32, 5), (64, 8), (96, 33), (576, 65), (1536, 40), (8960, 17)]


@pytest.mark.parametrize("shape", GROUPED_SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_product_with_four_bits_is_that_of_the_standard_nodes(
    instructions: kernels.Kernels, shape: tuple[int, int], tmp_path: Path
) -> None:
    weight = FourBits.random(*shape)
    weight.codes[:, 0], weight.zero_points[:, 0] = 15, 0  # with the highest codes this is the largest sum
    weight.codes[:, -1], weight.zero_points[:, -1] = 0, 15
    weight.multipliers[:, [0, -1]] = weight.multipliers.max()
    graph = weight.write(tmp_path / "product.onnx")
    draw = np.random.default_rng(0)
    for rows in (1, 2, 3, 8, 11, 19, 40):
        x = draw.normal(0, 1, (rows, shape[0])).astype(np.float32)
        x[0] = 1
        x[rows // 2] *= rows % 2
        x[-1] *= np.float32(1e-37)
        y = run(graph, x, instructions.library, threads=1 + rows % 2)
        np.testing.assert_array_equal(y, slow_product(x, weight.integers(), weight.scale))
        np.testing.assert_array_equal(y, run(graph, x, None, threads=1))


@pytest.mark.parametrize("form", [in_panels, lambda codes: FourBits.random(*codes.shape).in_panels()])
@pytest.mark.parametrize("spoil", ["plain", "inputs", "panels", "scale"])
def test_a_weight_of_a_wrong_shape_is_an_error(
    instructions: kernels.Kernels, spoil: str, form: Callable[[np.ndarray], np.ndarray], tmp_path: Path
) -> None:
    weight, scale = form(np.ones((128, 70), np.int8)), np.ones(70, np.float32)
    if spoil == "plain":  # as in bundles of older versions
        weight = np.ones((128, 70), weight.dtype)
    weight = weight[:, :-1] if spoil == "inputs" else weight[:-1] if spoil == "panels" else weight
    graph = save_panels(tmp_path / "product.onnx", weight, scale[:-30] if spoil == "scale" else scale)
    with pytest.raises(Exception, match="export bundles of older versions again|last axis of x must be"):
        run(graph, np.ones((1, 128), np.float32), instructions.library, threads=1)


def test_the_pages_of_a_file_that_was_copied_are_given_back(
    instructions: kernels.Kernels, tmp_path: Path
) -> None:
    weight = np.random.default_rng(0).integers(-127, 128, (1000, 3000)).astype(np.int8)
    graph = write_product(tmp_path / "product.onnx", weight, np.ones(3000, np.float32))
    onnx.save(onnx.load(graph), graph, save_as_external_data=True, location="weights.bin")
    session = open_session(onnxruntime, graph, ["CPUExecutionProvider"], {}, operators=instructions.library)
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    here = [entry for entry in maps if str(tmp_path / "weights.bin") in entry]
    assert here
    assert sum(int(kilobytes) for entry in here for kilobytes in re.findall(r"Rss: +(\d+)", entry)) < 100
    x = np.ones((1, 1, 1000), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0][0, 0], weight.sum(0, dtype=np.int32) * 1.0)


def test_numbers_between_two_codes_are_rounded_as_by_a_division(
    instructions: kernels.Kernels, tmp_path: Path
) -> None:
    graph = write_product(tmp_path / "product.onnx", np.eye(255, dtype=np.int8), np.ones(255, np.float32))
    largest = np.random.default_rng(0).uniform(1, 2, (40, 1)).astype(np.float32)
    largest[::8] *= np.float32(1e-30)
    x = (np.arange(-127, 128, dtype=np.float32) + np.float32(0.5)) / 127 * largest
    x[1::2] = np.nextafter(x[1::2], np.float32(0))
    x[:, -1:] = largest
    y = run(graph, x, instructions.library, threads=1)
    np.testing.assert_array_equal(y, slow_product(x, np.eye(255), np.ones(255, np.float32)))


def test_rows_with_infinite_numbers_are_those_of_the_standard_nodes(
    instructions: kernels.Kernels, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    weight = draw.integers(-63, 64, (70, 40)).astype(np.int8)
    graph = write_product(tmp_path / "product.onnx", weight, np.full(40, 0.01, np.float32))
    x = draw.normal(0, 1, (3, 70)).astype(np.float32)
    x[0, 5], x[2, 69] = np.inf, -np.inf
    y = run(graph, x, instructions.library, threads=1)
    np.testing.assert_array_equal(y, run(graph, x, None, threads=1))


@pytest.mark.usefixtures("instructions")
def test_a_bundle_has_the_same_steps_with_and_without(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExportOptions(block=6, precision="w8a8", logits=True)
    export_onnx(open_checkpoint(str(checkpoints("llama"))), tmp_path / "w8a8", options)
    config = GenerationConfig(max_new_tokens=24, tau=0.3)

    def answer() -> tuple[list[int], list[float]]:
        completion = Session.open(tmp_path / "w8a8", threads=1, cache_bytes=0).generate([5, 17, 99], config)
        return completion.token_ids, completion.confidences

    with_kernels = answer()
    monkeypatch.setenv(kernels.VARIABLE, kernels.OFF)
    assert with_kernels == answer()


def test_the_operator_replaces_all_standard_nodes(instructions: kernels.Kernels, tmp_path: Path) -> None:
    weight = np.ones((8, 8), np.int8)
    graph = write_product(tmp_path / "product.onnx", weight, np.ones(8, np.float32))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(instructions.library))
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones((1, 2, 8), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = {event["args"]["op_name"] for event in events if "op_name" in event.get("args", {})}
    assert nodes == {PRODUCT}


@pytest.mark.usefixtures("instructions")
def test_a_wrong_name_and_a_broken_library_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import mars_export_kernels

    monkeypatch.setenv(kernels.VARIABLE, "avx3")
    with pytest.raises(SessionError, match=r"MARS_EXPORT_KERNELS=avx3 is not .* set it to 0"):
        kernels.installed()
    monkeypatch.delenv(kernels.VARIABLE)
    monkeypatch.setattr(mars_export_kernels, "LIBRARY", tmp_path / "cut.so")
    (tmp_path / "cut.so").write_bytes(BUILT_KERNELS.joinpath("mars_export_kernels").name.encode())
    with pytest.raises(SessionError, match=r"does not load .* install it again"):
        kernels.installed()
    assert doctor._kernels().state == "bad"


def test_an_older_onnxruntime_refuses_the_library(instructions: kernels.Kernels) -> None:
    """A copy of OrtApiBase that has no version above 1, as for headers of a newer release."""
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    get_base = ctypes.CDLL(str(library)).OrtGetApiBase
    get_base.restype = ctypes.POINTER(ctypes.c_void_p)
    get_api_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_api = get_api_type(get_base()[0])
    older = get_api_type(lambda version: get_api(version) if version == 1 else None)
    base = (ctypes.c_void_p * 2)(ctypes.cast(older, ctypes.c_void_p), get_base()[1])
    register = ctypes.CDLL(str(instructions.library)).RegisterCustomOps
    register.restype = ctypes.c_void_p
    status = register(None, base)
    functions = ctypes.cast(get_api(1), ctypes.POINTER(ctypes.c_void_p))
    message = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(functions[2])(status)  # GetErrorMessage
    assert b"update onnxruntime" in message


def test_the_path_for_other_programs(instructions: kernels.Kernels) -> None:
    import mars_export_kernels

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(mars_export_kernels.get_library_path())
    assert Path(mars_export_kernels.get_library_path()) == instructions.library


@pytest.mark.usefixtures("instructions")
def test_a_package_built_without_a_compiler_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import mars_export_kernels

    monkeypatch.setattr(mars_export_kernels, "LIBRARY", tmp_path / "absent.so")
    assert kernels.installed() is None
    assert doctor._kernels().state == "absent"
