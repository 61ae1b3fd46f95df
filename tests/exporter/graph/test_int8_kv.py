"""Attention over int8 entries: close to attention in floating point, and the same for every width of a
step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import shell
from support.attention import Heads, Step, float_attention, run, write_graph
from support.fixtures import Exported, Named

from mars_export import Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph import int8_kv
from mars_export.exporter.option_rules import check_options
from mars_export.runtime.device.ort import kernels
from mars_export.runtime.errors import ExportError, MarsWarning

SIZES = (Heads(9, 3, 64), Heads(4, 4, 16, window=5), Heads(4, 1, 80), Heads(2, 1, 8))


def texts(draw: np.random.Generator, sizes: Heads, slots: int) -> Step:
    """Two rows without past entries."""
    return Step.drawn(draw, sizes, slots, slots + 3, [0, 0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_close_to_attention_in_floating_point(sizes: Heads, tmp_path: Path) -> None:
    """Errors relative to the size of the outputs: 8 bits round a number to 0.4 % of the largest."""
    step = texts(np.random.default_rng(0), sizes, 60)
    y, _, _ = run(write_graph(tmp_path / "graph.onnx", sizes), step)
    exact = float_attention(step.q, step.k, step.v, 0, sizes.window)
    assert np.sqrt(np.square(y - exact).mean()) < 0.012 * np.sqrt(np.square(exact).mean())


def test_a_large_number_in_each_key_costs_no_accuracy(tmp_path: Path) -> None:
    """As models with biases of keys have, such as Qwen2. Without the rotation the error is 0.165."""
    sizes = Heads(4, 2, 64)
    step = texts(np.random.default_rng(0), sizes, 60)
    step.k[..., 7] += 100
    y, _, _ = run(write_graph(tmp_path / "graph.onnx", sizes), step)
    exact = float_attention(step.q, step.k, step.v, 0, None)
    assert np.sqrt(np.square(y - exact).mean()) < 0.05 * np.sqrt(np.square(exact).mean())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_its_bits_do_not_depend_on_the_width_of_a_step(sizes: Heads, tmp_path: Path) -> None:
    graph, whole = write_graph(tmp_path / "graph.onnx", sizes), texts(np.random.default_rng(0), sizes, 40)
    y, key, value = run(graph, whole)
    parts, step = [], whole
    for start, stop in ((0, 7), (7, 8), (8, 39), (39, 40)):
        part = replace(step.slots(start, stop), kv_length=np.array([start, start]))
        made, new_key, new_value = run(graph, part)
        step = replace(step, key=new_key, value=new_value)
        parts.append(made)
    np.testing.assert_array_equal(np.concatenate(parts, 1), y)
    np.testing.assert_array_equal(step.key[:, :, :40], key[:, :, :40])
    np.testing.assert_array_equal(step.value[:, :, :40], value[:, :, :40])


def test_rows_of_zeros_and_of_extreme_numbers_are_numbers(tmp_path: Path) -> None:
    sizes = Heads(2, 1, 16)
    step = texts(np.random.default_rng(0), sizes, 4)
    step.q[0, 0, 0], step.k[0, 0, 1], step.v[0, 0] = 0, 0, 0
    step.k[1, 0, 2] *= np.float32(1e30)
    step.v[1, 0, 1] *= np.float32(1e-38)
    y, _, _ = run(write_graph(tmp_path / "graph.onnx", sizes), step)
    assert np.isfinite(y).all()
    assert not y[0].any()


def test_weights_are_powers_of_two() -> None:
    made = int8_kv.weights().astype(np.float64)
    exact = int8_kv.HEAVIEST * np.exp2(-np.arange(len(made)) / int8_kv.OCTAVE)
    assert np.abs(made - exact)[:-1].max() <= 0.5 + 4e-6 * int8_kv.HEAVIEST
    assert made[0] == int8_kv.HEAVIEST
    assert made[-1] == 0


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256, 512])
def test_sums_of_integers_are_exact(head_dim: int) -> None:
    assert int8_kv.max_query(head_dim) * int8_kv.CODE * head_dim <= 2**24
    matrix = int8_kv.rotation(head_dim)
    block = int8_kv.rotated_block(head_dim)
    np.testing.assert_array_equal(matrix @ matrix, block * np.eye(head_dim))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ExportOptions(kv="int8"), "--kv int8 is for --precision w8a8 and w4a8, not fp32"),
        (ExportOptions(kv="fp8", precision="w8a8"), "--kv must be one of float, int8, not 'fp8'"),
        (
            ExportOptions(kv="int8", precision="w8a8", kv_layout="appended"),
            "--kv int8 needs --kv-layout in-place",
        ),
    ],
)
def test_options_that_do_not_fit(checkpoints: Named, options: ExportOptions, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        check_options(options, open_checkpoint(str(checkpoints("llama"))).dims)


def test_an_unknown_kv_type_is_refused_before_the_checkpoint_is_read() -> None:
    done = shell.run("onnx", "no-such-checkpoint", "--precision", "w8a8", "--kv", "int4")
    assert done.returncode == 2
    assert done.stderr == "error: --kv must be one of float, int8, not 'int4'\n"


def test_a_bundle_without_the_kernels_says_what_it_costs(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, kernels.OFF)
    bundle = exported("qwen2", precision="w8a8", kv="int8")
    with pytest.warns(MarsWarning, match="is turned off by MARS_EXPORT_KERNELS=0, so its int8"):
        Session.open(bundle, threads=1)
