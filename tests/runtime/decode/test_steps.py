"""The steps of a sequence with a tau: their tokens, and the confidence that ended each. Another tau takes the
same first steps, until it passes one of these."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mars_export import GenerationConfig
from mars_export.runtime.decode.backend import Predictions
from mars_export.runtime.decode.sequence import Sequence

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
    ("steps", "counted"),
    [
        ([[(5, 0.1), (6, 0.95), (7, 0.92)]], ((3, None),)),  # the first is always accepted
        ([[(5, 0.9), (6, 0.95), (7, 0.3), (8, 0.89)]], ((2, 0.3),)),  # what follows it was not reached
        ([[(5, 0.9), (6, 0.6)], [(5, 0.9), (6, 0.92)]], ((1, 0.6), (2, None))),
        ([[(5, 0.9), (EOS, 0.95), (7, 0.3)]], ((2, None),)),  # the sequence was over
        ([[(5, 0.9)] * 8 + [(6, 0.3)]], ((8, None),)),  # the answer was full
    ],
)
def test_the_confidence_that_ends_a_step(
    steps: list[list[tuple[int, float]]], counted: tuple[tuple[int, float | None], ...]
) -> None:
    assert row_after(steps).stats.steps == counted


def test_of_an_entropy_the_higher_ones_end_a_step() -> None:
    assert row_after([[(5, 0.1), (6, 2.0)], [(5, 0.1), (6, 0.3)]], 0.5, "entropy").stats.steps == (
        (1, 2.0),
        (2, None),
    )


def test_nan_passes_no_tau() -> None:
    ((count, refused),) = row_after([[(5, 0.9), (6, math.nan)]]).stats.steps
    assert count == 1 and refused is not None and math.isnan(refused)


def test_one_token_mode_and_exact_mode_refuse_nothing() -> None:
    assert row_after([[(5, 0.1)], [(6, 0.1)]], tau=1.0).stats.steps == ((1, None), (1, None))
    row = Sequence(0, [1], GenerationConfig(), [EOS])
    row.accept(Predictions(np.array([5, 6]), *[np.array([0.9, 0.1])] * 2, None))
    assert row.stats.steps == ((1, None),)
    assert "steps" not in row.stats.to_dict()


def test_later_steps_do_not_change_a_copy() -> None:
    row = row_after([[(5, 0.9), (6, 0.6)]])
    before = row.stats.copy()
    row.accept(Predictions(np.array([5]), *[np.array([0.9])] * 2, None))
    assert (before.steps, row.stats.steps) == (((1, 0.6),), ((1, 0.6), (1, None)))
