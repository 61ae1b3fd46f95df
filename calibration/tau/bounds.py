"""A test and a confidence bound for the mean of values in [-1, 1], valid at every sample size.

The betting test of Waudby-Smith and Ramdas (Estimating means of bounded random variables by betting, 2020). A
gambler starts with 1 and, before each value x, stakes a share s of the capital on "x falls below m": capital
*= 1 + s * (m - x). If the mean is m or more, the game is fair or worse. Then the capital is a nonnegative
supermartingale, and by Ville's inequality it ever reaches 1 / level with a probability of at most `level`.
The stake may depend on all earlier values: a good choice makes the test powerful, but no choice makes it
invalid.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

import numpy as np

MAX_STAKE = 0.75  # below 1, so that no single value can ruin the gambler
PRIOR_VARIANCE, PRIOR_WEIGHT = 0.02, 10  # a first guess, soon outweighed: paired drops are mostly zero
_LOWEST_MEAN = 1 - 1 / MAX_STAKE  # below it a stake could lose more than the capital
_SEARCH = 10**6  # items; the search ends here


def p_value(values: np.ndarray, mean: float, level: float) -> np.ndarray:
    """p-values of "the true mean is `mean` or more", along the last axis of float values [..., n] in [-1, 1].

    `level` is the level of the test: stakes are tuned to it and to n, both fixed beforehand. The order of the
    values must not depend on them.
    """
    capital = np.cumsum(np.log1p(_stakes(values, level) * (mean - values)), axis=-1)
    return np.asarray(np.exp(-np.maximum(capital.max(axis=-1), 0.0)))


def upper_bound(values: np.ndarray, level: float) -> float:
    """An upper bound of the true mean of `values` [n] in [-1, 1], with confidence 1 - level; at least -1/3.

    Stakes do not depend on the tested mean, so the capital grows with the mean, and a search finds the
    smallest mean with enough capital.
    """
    stakes = _stakes(values, level)
    low, high = _LOWEST_MEAN, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        enough = np.cumsum(np.log1p(stakes * (middle - values))).max() >= -np.log(level)
        low, high = (low, middle) if enough else (middle, high)
    return high


def interval(values: np.ndarray, level: float) -> tuple[float, float]:
    """A confidence interval of the true mean of `values` [n] in [0, 1], with confidence 1 - level."""
    return 1 - upper_bound(1 - values, level / 2), upper_bound(values, level / 2)


@cache
def items_needed(mean: float, level: float) -> int:
    """The fewest items that can show a bound of `mean`, which takes values of zero only; at most _SEARCH."""
    if mean <= 0:
        raise ValueError("no number of items shows a bound of zero or less")

    def suffices(count: int) -> bool:
        return bool(p_value(np.zeros(count), mean, level) <= level)

    return 1 + bisect_left(range(1, _SEARCH), True, key=suffices)


def _stakes(values: np.ndarray, level: float) -> np.ndarray:
    """The stake before each value, from the variance of the earlier values."""
    count = values.shape[-1]
    seen = np.arange(1, count + 1)
    means = np.cumsum(values, axis=-1) / (seen + 1)
    variances = (PRIOR_WEIGHT * PRIOR_VARIANCE + np.cumsum((values - means) ** 2, axis=-1)) / (
        PRIOR_WEIGHT + seen
    )
    known = np.concatenate([np.full((*values.shape[:-1], 1), PRIOR_VARIANCE), variances[..., :-1]], axis=-1)
    return np.asarray(np.minimum(np.sqrt(2 * np.log(1 / level) / (count * known)), MAX_STAKE))
