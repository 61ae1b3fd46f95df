"""GPTQ (arXiv 2210.17323): chooses the codes of a weight that change its products with typical inputs least.

Columns are rounded one after the other, those with the largest inputs first. The columns that are not rounded
yet compensate for the error of each. Scales are those of plain rounding, chosen beforehand, so that a group's
columns can be rounded in any order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..codes import Codec, Encoded

DAMPING = 0.01  # of the usual second moment, added to each, so that inputs absent from the text count too
# By the bits of a code. Four are too few for what the inputs of first tokens need.
USUAL = {4: 1.0, 8: 0.98}  # of the inputs, those with the smallest moments, are the usual ones
MAX_LENGTH = {4: 1, 8: 30}  # of an input, in median lengths; a longer one counts as much
MAX_DAMPING = 1e4
COLUMNS_AT_ONCE = 128


class Moments:
    """Sums of x x^T over inputs x as they come, fp32 [inputs, inputs].

    The inputs of a sequence's first token can be a thousand times longer than others. All later tokens attend
    to it, so its products must be right; but with all of their length the sums would have no other digits.
    """

    def __init__(self, inputs: int, bits: int) -> None:
        self.sums = torch.zeros(inputs, inputs)
        self._max_length = MAX_LENGTH[bits]

    def add(self, x: torch.Tensor) -> None:
        """x [tokens, inputs]"""
        lengths = x.norm(dim=-1, keepdim=True)
        limit = self._max_length * lengths.median()
        kept = x * (limit / lengths.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
        self.sums.addmm_(kept.T, kept)

    @property
    def are_finite(self) -> bool:
        # A number that is not finite makes its row and column so too: the diagonal is enough.
        return bool(torch.isfinite(self.sums.diagonal()).all())


def choose_codes(
    weight: torch.Tensor, moments: torch.Tensor, codec: Codec, scale_dtype: np.dtype[Any]
) -> Encoded:
    """Codes of `weight` [outputs, inputs] for inputs with second moments `moments` [inputs, inputs]."""
    outputs, inputs = weight.shape
    plain = codec.encode(weight.numpy(), scale_dtype)
    group = inputs // codec.num_groups(inputs)
    scales = _by_column(plain.scales.astype(np.float32), group)
    zeros = torch.zeros(()) if plain.zeros is None else _by_column(plain.zeros.astype(np.float32), group)
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    spread = _spread(moments[order][:, order], USUAL[codec.bits])
    rest = weight.T[order]  # [inputs, outputs]: a column of the weight is a contiguous row here
    scales, zeros = scales[order], zeros if zeros.ndim == 0 else zeros[order]
    wide = torch.where(scales > 0, scales, 1)
    codes = torch.empty_like(rest)
    for start in range(0, inputs, COLUMNS_AT_ONCE):
        stop = min(start + COLUMNS_AT_ONCE, inputs)
        losses = torch.empty(stop - start, outputs)
        for column in range(start, stop):
            zero = zeros if zeros.ndim == 0 else zeros[column]
            code = torch.round(rest[column] / wide[column]).add_(zero).clamp_(codec.lowest, codec.highest)
            codes[column] = code
            loss = (rest[column] - (code - zero) * scales[column]) / spread[column, column]
            rest[column:stop].addr_(spread[column, column:stop], loss, alpha=-1)
            losses[column - start] = loss
        rest[stop:].addmm_(spread[start:stop, stop:].T, losses, alpha=-1)
    back = torch.empty_like(codes)
    back[order] = codes
    array = back.T.reshape(outputs, -1, group).numpy().astype(plain.codes.dtype)
    if (plain.scales <= 0).any():  # groups of zeros keep their codes of zero
        array[plain.scales <= 0] = plain.codes[plain.scales <= 0]
    return Encoded(array, plain.scales, plain.zeros)


def _by_column(values: np.ndarray, group: int) -> torch.Tensor:
    """[outputs, groups] -> [inputs, outputs]"""
    return torch.from_numpy(np.repeat(np.ascontiguousarray(values.T), group, 0))


def _spread(moments: torch.Tensor, usual_share: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of damped moments: row i says how to spread column i's loss.

    Moments are singular if an input is always zero, or with fewer tokens than inputs. Damping is raised until
    they are regular.
    """
    sizes = moments.diagonal().sort().values
    usual = sizes[: math.ceil(usual_share * len(sizes))].mean() or sizes.mean()
    if usual <= 0:
        return torch.eye(len(moments))
    damping = DAMPING
    while damping <= MAX_DAMPING:
        factor = moments.clone()
        factor.diagonal().add_(damping * usual)
        factor, failed = torch.linalg.cholesky_ex(factor)  # reuse the name to free the large matrix
        if not failed:
            factor = torch.cholesky_inverse(factor)
            factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
            if not failed and torch.isfinite(factor.diagonal()).all():
                return factor
        damping *= 10
    return torch.eye(len(moments))  # no damping makes them regular: plain rounding
