"""The confidence of the prediction that came nearest to passing tau: between the two, every other tau gives
the same answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mars_export import GenerationConfig
from mars_export.runtime.decode.sequence import Predictions, Sequence

EOS = 2


def row_after(
    steps: list[list[tuple[int, float]]], tau: float = 0.9, metric: str = "probability"
) -> Sequence:
    """A row after steps with these tokens and confidences."""
    row = Sequence(0, [1], GenerationConfig(tau=tau, metric=metric, max_new_tokens=8), [EOS])
    for step in steps:
        ids, confidences = np.array([i for i, _ in step]), np.array([c for _, c in step])
        row.accept(Predictions(ids, confidences, confidences, None))
    return row


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ([[(5, 0.1), (6, 0.95), (7, 0.92)]], None),  # the first is always accepted
        ([[(5, 0.9), (6, 0.95), (7, 0.3), (8, 0.89)]], 0.3),  # what follows it was not reached
        ([[(5, 0.9), (6, 0.6)], [(5, 0.9), (6, 0.2)]], 0.6),
        ([[(5, 0.9), (6, 0.2)], [(5, 0.9), (6, 0.6)]], 0.6),
        ([[(5, 0.9), (EOS, 0.95), (7, 0.3)]], None),  # the sequence was over
        ([[(5, 0.9)] * 8 + [(6, 0.3)]], None),  # the answer was full
        ([[(5, 0.9), (6, math.nan)], [(5, 0.9), (6, 0.2)]], 0.2),  # NaN passes no tau
        ([[(5, 0.9), (6, math.nan)]], None),
    ],
)
def test_the_nearest_refused_prediction(steps: list[list[tuple[int, float]]], refused: float | None) -> None:
    assert row_after(steps).stats.refused == refused


def test_of_an_entropy_the_lowest_is_the_nearest() -> None:
    assert row_after([[(5, 0.1), (6, 2.0)], [(5, 0.1), (6, 0.7)]], 0.5, "entropy").stats.refused == 0.7


def test_one_token_mode_and_exact_mode_refuse_nothing() -> None:
    assert row_after([[(5, 0.1)], [(6, 0.1)]], tau=1.0).stats.refused is None
    row = Sequence(0, [1], GenerationConfig(), [EOS])
    row.accept(Predictions(np.array([5, 6]), *[np.array([0.9, 0.1])] * 2, None))
    assert row.stats.refused is None
    assert "refused" not in row.stats.to_dict()
