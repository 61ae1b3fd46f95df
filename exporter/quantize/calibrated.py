"""Chooses calibrated codes for a checkpoint's Linear weights, one layer at a time.

Hidden states of all sequences are carried from layer to layer. For each layer, the second moments of the
inputs of each Linear map are summed up, codes are chosen, and the layer runs again with the decoded weights,
so that later layers are calibrated on the inputs they will really get. Memory is that of the hidden states,
of one layer in fp32, and of the moments and factors of its widest map.

GPTQ (arXiv 2210.17323) chooses the codes that change a weight's products with typical inputs least. Columns
are rounded one after the other, those with the largest inputs first. The columns that are not rounded yet
compensate for the error of each. Scales are those of plain rounding, chosen beforehand, so that a group's
columns can be rounded in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...runtime.errors import ExportError
from ..check import reference
from ..checkpoint import names
from ..checkpoint.dims import Dims
from ..checkpoint.tensors import Tensors, chunks
from ..codes import Codec, Encoded, Quantization
from ..graph.weights import split_by_codec

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
    group, units = inputs // codec.num_groups(inputs), plain.units
    scales = _by_column(units, group)
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
    if (units <= 0).any():  # groups of zeros keep their codes of zero
        array[units <= 0] = plain.codes[units <= 0]
    return replace(plain, codes=array)


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


TOKENS_AT_ONCE = 512  # of whole sequences; attention is quadratic in it


class CalibratedTensors:
    """Tensors whose Linear weights of layers are codes of the form `storage`, chosen when a layer is first
    requested, and those of an lm_head of its own, if products are of integers.

    `progress` is called after each layer with the number of layers that are done. Layers must be requested in
    their order, because only the codes of one are kept.
    """

    def __init__(
        self,
        stored: Tensors,
        dims: Dims,
        storage: Quantization,
        sequences: Sequence[Sequence[int]],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._stored, self._dims, self._storage = stored, dims, storage
        self._head = storage.table(storage.head) if storage.is_integer and not dims.tied else None
        self._progress = progress or (lambda done: None)
        self._batches = list(batches(sequences))
        with torch.inference_mode():
            # All at once, because a table may be computed when it is read.
            every = reference.embedded(dims, stored, [ids for batch in self._batches for ids in batch])
            self._hidden = list(every.split([sum(map(len, batch)) for batch in self._batches]))
        self._codes: dict[str, Encoded] = {}
        self._next_layer = 0
        # Linear maps that get the same input are one matrix for GPTQ, if their codes are of one form.
        qkv = [parts for _, parts in split_by_codec("qkv", dims.quirks.qkv, storage)]
        self._together = (*qkv, (names.O,), dims.quirks.gate_up, (names.DOWN,))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._stored.shapes

    def read(self, name: str) -> np.ndarray:
        """The checkpoint's weight, unchanged."""
        return self._stored.read(name)

    def holds(self, name: str, codec: Codec) -> bool:
        if name == names.HEAD:
            return codec == self._head
        return names.is_linear(name) and codec == self._storage.codec(name)

    def encoded(self, name: str, scale_dtype: np.dtype[Any]) -> Encoded:
        """The codes of a Linear weight.

        Raises ExportError for activations that are NaN or Inf, OverflowError for weights beyond
        `scale_dtype`.
        """
        if name == names.HEAD:
            with torch.inference_mode():
                return self._head_codes(scale_dtype)
        if name not in self._codes:
            assert name.startswith(names.layer(self._next_layer)), f"{name} is out of order"
            with torch.inference_mode():
                self._codes = self._run_layer(self._next_layer, scale_dtype)
            self._next_layer += 1
            self._progress(self._next_layer)
        return self._codes[name]

    def _run_layer(self, i: int, scale_dtype: np.dtype[Any]) -> dict[str, Encoded]:
        dims, weights = self._dims, reference.layer_weights(self._stored, i)
        moments = self._moments(i, weights)
        codes = {}
        for parts in self._together:
            keys = [f"{part}.weight" for part in parts]
            sizes = [len(weights[key]) for key in keys]
            joined = torch.cat([weights[key] for key in keys])
            codec = self._storage.codec(parts[0])
            encoded = choose_codes(joined, moments.pop(parts[0]).sums, codec, scale_dtype)
            if not np.isfinite(encoded.scales).all():
                raise OverflowError(keys[0])
            decoded = torch.from_numpy(encoded.decoded().reshape(joined.shape))
            start = 0
            for part, key, size in zip(parts, keys, sizes, strict=True):
                rows = slice(start, start + size)
                codes[names.weight(i, part)] = encoded.rows(rows)
                weights[key] = decoded[rows]
                start += size
        if i + 1 < dims.num_layers or self._head is not None:
            for at, (x, batch) in enumerate(zip(self._hidden, self._batches, strict=True)):
                self._hidden[at] = reference.layer(dims, i, weights, x, *places(batch))
        else:
            self._hidden = []
        return codes

    def _head_codes(self, scale_dtype: np.dtype[Any]) -> Encoded:
        assert self._head is not None and self._next_layer == self._dims.num_layers
        moments = Moments(self._dims.hidden_size, self._head.bits)
        for x in self._hidden:
            moments.add(reference.head_input(self._dims, self._stored, x))
        self._hidden = []
        parts = [
            choose_codes(torch.from_numpy(np.array(rows, np.float32)), moments.sums, self._head, scale_dtype)
            for rows in chunks(self._stored.read(names.HEAD))
        ]
        return Encoded(
            np.concatenate([p.codes for p in parts]), np.concatenate([p.scales for p in parts]), None
        )

    def _moments(self, i: int, weights: dict[str, torch.Tensor]) -> dict[str, Moments]:
        """The moments of each group of maps, by its first part."""
        sums = {
            parts[0]: Moments(weights[f"{parts[0]}.weight"].shape[1], self._storage.codec(parts[0]).bits)
            for parts in self._together
        }

        def watch(part: str, value: torch.Tensor) -> None:
            if part in sums:
                sums[part].add(value)

        for x, batch in zip(self._hidden, self._batches, strict=True):
            reference.layer(self._dims, i, weights, x, *places(batch), watch)
        strange = [part for part, moments in sums.items() if not moments.are_finite]
        if strange:
            raise ExportError(
                f"layer {i} gives NaN or Inf for the calibration text (inputs of {', '.join(strange)})."
                " Nothing was written. The checkpoint's weights are broken, or too large for fp32: train or"
                " download it again"
            )
        return sums


def places(batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.places([len(sequence) for sequence in batch])


def batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Batches of whole sequences, of similar lengths, that are computed together."""
    batch: list[Sequence[int]] = []
    for sequence in sorted(sequences, key=len):
        if batch and sum(map(len, batch)) + len(sequence) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch
