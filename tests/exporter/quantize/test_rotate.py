"""A rotated model computes the same in every family, and its activations have fewer outliers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny
from support.families import ALL

from mars_export.exporter.check import reference
from mars_export.exporter.checkpoint import names
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.quantize.rotate import (
    ROOM,
    RotatedTensors,
    SplitTensors,
    _factors,
    keeps_residual,
    rotated,
    smoothing,
)

SEQUENCES = [[(37 * i + 5 * k) % 250 for i in range(20 + k)] for k in range(3)]


@pytest.mark.parametrize("size", [1, 2, 12, 48, 64, 96, 576, 640])
def test_the_rotation_is_orthogonal_and_spreads_single_channels(size: int) -> None:
    matrix = rotated(torch.eye(size))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert matrix.abs().max() <= (2 / size) ** 0.5 + 1e-6


@pytest.mark.parametrize("name", ALL)
def test_a_rotated_model_computes_the_same(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny.write(ALL[name], tmp_path / name)))
    dims = checkpoint.dims
    factors = torch.rand(dims.num_layers, dims.intermediate_size) * 3 + 0.2
    turned = RotatedTensors(checkpoint.tensors, dims, factors)
    weights = {key: turned.read(key) for key in turned.shapes}
    assert {key: value.shape for key, value in weights.items()} == turned.shapes
    plain = checkpoint.tensors.read(names.EMBEDDING).astype(np.float32)
    assert np.allclose(weights[names.EMBEDDING], plain, atol=1e-3) == keeps_residual(dims)
    stored = SplitTensors(checkpoint.tensors, dims)  # q, k and v are apart, also of a family that joins them
    mixer = (names.RECURRENT_OUT, names.RECURRENT_IN[0]) if dims.is_recurrent(0) else (names.O, names.V)
    for part in (*mixer, names.DOWN, names.UP):
        name = names.weight(0, part)
        assert not np.allclose(weights[name], stored.read(name), atol=1e-3), part
    expected = reference.logits(dims, checkpoint.tensors, SEQUENCES)
    found = reference.logits(turned.dims, turned, SEQUENCES)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()


def test_outliers_are_spread() -> None:
    x = torch.randn(50, 96)
    x[:, 5] *= 100

    def flatness(value: torch.Tensor) -> float:
        return float((value.abs().amax(-1) / value.pow(2).mean(-1).sqrt()).mean())

    assert flatness(rotated(x)) < 0.4 * flatness(x)


def test_smoothing_moves_large_channels_to_the_weights(tmp_path: Path) -> None:
    model = tiny.build(ALL["llama"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[7] *= 50
    tiny.save(model, tmp_path / "c")
    checkpoint = open_checkpoint(str(tmp_path / "c"))
    factors = smoothing(checkpoint.dims, checkpoint.tensors, SEQUENCES)
    assert factors.shape == (checkpoint.dims.num_layers, checkpoint.dims.intermediate_size)
    assert factors[0, 7] == factors[0].max() > 3 * factors[0].median()
    assert (smoothing(checkpoint.dims, checkpoint.tensors, [[5]]) > 0).all(), "first tokens alone"


def test_an_input_that_is_huge_at_first_tokens_gets_weights_that_are_not_near_zero() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    weight[:, 5] *= 1e-3
    first, later = torch.ones(32), torch.ones(32)
    first[5] = 1e4
    usual, made = _factors(weight, later, later), _factors(weight, first, later)
    assert torch.equal(made[:5], usual[:5])
    assert torch.equal(made[6:], usual[6:])
    scaled = weight * made
    assert scaled[:, 5].abs().mean() > 20 * (weight * usual)[:, 5].abs().mean()
    assert scaled.abs().amax(1).median() <= ROOM * (weight * usual).abs().amax(1).median()
