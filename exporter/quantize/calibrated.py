"""Chooses calibrated codes for a checkpoint's Linear weights, one layer at a time.

Hidden states of all sequences are carried from map to map: the second moments of a Linear map's inputs are
summed up, its codes are chosen, and the next maps get the products of the decoded weight, so that all are
calibrated on the inputs they will really get. Memory is that of the hidden states, of one layer in fp32, and
of four square matrices of the size of its widest input.

GPTQ (arXiv 2210.17323) chooses the codes that change a weight's products with typical inputs least. Columns
are rounded one after the other, those with the largest inputs first. The columns that are not rounded yet
compensate for the error of each. Scales are those of plain rounding, chosen beforehand, so that a group's
columns can be rounded in any order. With moments R^T R, R upper triangular, and the columns sorted so that
the last is rounded first, this is Babai's nearest plane algorithm: column j is rounded after adding the sum
of R[j, k] / R[j, j] times the error of column k over all k > j (arXiv 2507.18553). R takes one factorization.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...runtime.errors import ExportError
from ...runtime.machine import cores
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
OUTPUTS_AT_ONCE = 1024  # of a weight: what has been rounded of them stays in a processor's cache
INPUTS_AT_ONCE = 2048  # of moments, which are symmetric: only products from the diagonal on are computed


@contextmanager
def quick_products() -> Iterator[None]:
    """Products of fp32 matrices have bf16 factors on processors that multiply those faster."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread here, and in threads that begin here: for many small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Moments:
    """Sums of x x^T over inputs x as they come.

    The inputs of a sequence's first token can be a thousand times longer than others. All later tokens attend
    to it, so its products must be right; but with all of their length the sums would have no other digits.

    Correlations in a few tokens are partly chance. Codes that make use of it lose more on other texts than by
    rounding. So the sums count as many tokens more as there are inputs, of the same size but uncorrelated.
    """

    def __init__(self, inputs: int, bits: int) -> None:
        self._rows = [
            torch.zeros(min(INPUTS_AT_ONCE, inputs - at), inputs - at)
            for at in range(0, inputs, INPUTS_AT_ONCE)
        ]  # from the diagonal on
        self._max_length, self._tokens = MAX_LENGTH[bits], 0

    def add(self, x: torch.Tensor) -> None:
        """x [tokens, inputs]"""
        lengths = x.norm(dim=-1, keepdim=True)
        limit = self._max_length * lengths.median()
        kept = x * (limit / lengths.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
        self._tokens += len(x)
        for rows in self._rows:
            right = kept[:, -rows.shape[1] :]
            rows.addmm_(right[:, : len(rows)].T, right)

    @property
    def are_finite(self) -> bool:
        # A number that is not finite makes its row and column so too: the diagonal is enough.
        return all(bool(torch.isfinite(rows.diagonal()).all()) for rows in self._rows)

    @property
    def sums(self) -> torch.Tensor:
        """[inputs, inputs] fp32"""
        inputs = self._rows[0].shape[1]
        sums = torch.empty(inputs, inputs)
        for rows in self._rows:
            at = inputs - rows.shape[1]
            sums[at : at + len(rows), at:] = rows
            sums[at:, at : at + len(rows)] = rows.T
        sums.diagonal().mul_(1 + inputs / self._tokens)
        return sums


def choose_codes(
    weight: torch.Tensor, moments: torch.Tensor, codec: Codec, scale_dtype: np.dtype[Any]
) -> Encoded:
    """Codes of `weight` [outputs, inputs] for inputs with second moments `moments` [inputs, inputs]."""
    outputs, inputs = weight.shape
    plain = codec.encode(weight.numpy(), scale_dtype)
    group, units = inputs // codec.num_groups(inputs), plain.units
    order = torch.argsort(moments.diagonal(), stable=True)
    spread = _spread(moments[order[:, None], order], USUAL[codec.bits])
    groups = (order // group).tolist()
    codes = np.empty((outputs, inputs), plain.codes.dtype)

    def choose(start: int) -> None:
        rows = slice(start, start + OUTPUTS_AT_ONCE)
        scales = _by_group(units[rows])
        zeros = torch.zeros_like(scales) if plain.zeros is None else _by_group(plain.zeros[rows])
        wide = torch.where(scales > 0, scales, 1)
        errors = weight[rows].T[order]  # [inputs, outputs]: a column of the weight is a contiguous row here
        rest, chosen = errors.clone(), torch.empty_like(errors)

        def columns(first: int, last: int) -> None:
            if last - first > 1:
                middle = (first + last) // 2
                columns(middle, last)
                rest[first:middle].addmm_(spread[first:middle, middle:last], errors[middle:last])
                columns(first, middle)
                return
            at = groups[first]
            code = torch.round(rest[first] / wide[at]).add_(zeros[at]).clamp_(codec.lowest, codec.highest)
            chosen[first] = code
            errors[first].addcmul_(code.sub_(zeros[at]), scales[at], value=-1)

        with torch.inference_mode():
            columns(0, inputs)
        codes[rows, order.numpy()] = chosen.T.numpy()

    with one_thread(), ThreadPoolExecutor(cores()) as pool:
        list(pool.map(choose, range(0, outputs, OUTPUTS_AT_ONCE)))  # raises the error of one
    array = codes.reshape(outputs, -1, group)
    if (units <= 0).any():  # groups of zeros keep their codes of zero
        array[units <= 0] = plain.codes[units <= 0]
    return replace(plain, codes=array)


def _by_group(values: np.ndarray) -> torch.Tensor:
    """[outputs, groups] -> [groups, outputs] fp32"""
    return torch.from_numpy(np.ascontiguousarray(values.T, np.float32))


def _spread(moments: torch.Tensor, usual_share: float) -> torch.Tensor:
    """The upper Cholesky factor of damped moments, each row divided by its number on the diagonal. The
    moments are overwritten.

    They are singular if an input is always zero, or with fewer tokens than inputs. Damping is raised until
    they are regular.
    """
    sizes = moments.diagonal().sort().values
    usual = sizes[: math.ceil(usual_share * len(sizes))].mean() or sizes.mean()
    if usual <= 0:
        return torch.eye(len(moments))
    damping, added = DAMPING, 0.0
    while damping <= MAX_DAMPING:
        moments.diagonal().add_((damping - added) * usual)
        factor, failed = torch.linalg.cholesky_ex(moments, upper=True)
        if not failed and torch.isfinite(factor.diagonal()).all():
            return factor.div_(factor.diagonal()[:, None].clone())
        damping, added = 10 * damping, damping
    return torch.eye(len(moments))  # no damping makes them regular: plain rounding


TOKENS_AT_ONCE = 512  # of whole sequences; attention is quadratic in it


class CalibratedTensors:
    """Tensors whose Linear weights of layers are codes of the form `storage`, chosen when a layer is first
    requested, and those of an lm_head of its own, if products are of integers.

    `progress` is called with the number of layers that are done, from the first one on that is not in the
    directory `kept`. That holds the codes of each layer for an export that is interrupted, in a file that is
    named after all that they depend on. Layers must be requested in their order, because only the codes of
    one are in memory.
    """

    def __init__(
        self,
        stored: Tensors,
        dims: Dims,
        storage: Quantization,
        sequences: Sequence[Sequence[int]],
        progress: Callable[[int], None] | None = None,
        kept: Path | None = None,
    ) -> None:
        self._stored, self._dims, self._storage = stored, dims, storage
        self._head = storage.table(storage.head) if storage.is_integer and not dims.tied else None
        self._progress, self._kept = progress or (lambda done: None), kept
        self._batches = list(batches(sequences))
        with torch.inference_mode():
            # All at once, because a table may be computed when it is read.
            every = reference.embedded(dims, stored, [ids for batch in self._batches for ids in batch])
            self._hidden = list(every.split([sum(map(len, batch)) for batch in self._batches]))
        self._codes: dict[str, Encoded] = {}
        self._next_layer = 0

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._stored.shapes

    def read(self, name: str) -> np.ndarray:
        """The checkpoint's weight, unchanged."""
        return self._stored.read(name)

    def holds(self, name: str, codec: Codec) -> bool:
        if name == names.HEAD:
            return codec == self._head
        # An MTP layer, whose errors cost speed only, is rounded.
        is_ours = name.startswith("model.layers.") and names.is_linear(name)
        return is_ours and codec == self._storage.codec(name)

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
        return self._codes[name]

    def _run_layer(self, i: int, scale_dtype: np.dtype[Any]) -> dict[str, Encoded]:
        weights = reference.layer_weights(self._stored, i)
        path = None if self._kept is None else self._kept / f"{self._key(weights, scale_dtype)}.npz"
        codes = {} if path is None else read_codes(path)
        is_new = not codes
        if is_new:
            self._progress(i)
        runs = [
            reference.steps(self._dims, i, weights, x, *places(batch))
            for x, batch in zip(self._hidden, self._batches, strict=True)
        ]
        for groups in self._together(i) if is_new else ():
            moments = [self._moments(parts, weights) for parts in groups]
            with quick_products():
                for run in runs:
                    _, value = next(run)
                    for sums in moments:
                        sums.add(value)
            for parts, sums in zip(groups, moments, strict=True):
                if not sums.are_finite:
                    raise ExportError(
                        f"layer {i} gives NaN or Inf for the calibration text (inputs of {', '.join(parts)})."
                        " Nothing was written. The checkpoint's weights are broken, or too large for fp32:"
                        " train or download it again"
                    )
                keys = [f"{part}.weight" for part in parts]
                sizes = [len(weights[key]) for key in keys]
                joined = torch.cat([weights[key] for key in keys])
                encoded = choose_codes(joined, sums.sums, self._storage.codec(parts[0]), scale_dtype)
                if not np.isfinite(encoded.scales).all():
                    raise OverflowError(keys[0])
                for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
                    codes[part] = encoded.rows(slice(end - size, end))
                    self._decode(weights, part, codes[part])
        for part in codes if not is_new else ():
            self._decode(weights, part, codes[part])
        if i + 1 < self._dims.num_layers or self._head is not None:
            with quick_products():
                self._hidden = [reference.finished(run) for run in runs]
        else:
            self._hidden = []
        if is_new:
            if path is not None:
                write_codes(path, codes)
            self._progress(i + 1)
        return {names.weight(i, part): each for part, each in codes.items()}

    def _together(self, i: int) -> tuple[Sequence[Sequence[str]], ...]:
        """Linear maps that get the same input: one matrix for GPTQ, if their codes are of one form."""
        maps, output = self._dims.mixer(i)
        inputs = [parts for _, parts in split_by_codec("qkv", maps, self._storage)]
        return (inputs, [(output,)], [self._dims.quirks.gate_up], [(names.DOWN,)])

    def _moments(self, parts: Sequence[str], weights: dict[str, torch.Tensor]) -> Moments:
        return Moments(weights[f"{parts[0]}.weight"].shape[1], self._storage.codec(parts[0]).bits)

    def _decode(self, weights: dict[str, torch.Tensor], part: str, encoded: Encoded) -> None:
        key = f"{part}.weight"
        weights[key] = torch.from_numpy(encoded.decoded().reshape(weights[key].shape))

    def _key(self, weights: dict[str, torch.Tensor], scale_dtype: np.dtype[Any]) -> str:
        """A digest of what a layer's codes depend on; the hidden states stand for the text and all layers
        before.
        """
        about = (
            version("mars-export"),
            self._storage,
            scale_dtype.str,
            torch.get_num_threads(),
            sorted(weights),
        )
        digest = hashlib.sha256(repr(about).encode())
        for each in (*self._hidden, *(weights[name] for name in sorted(weights))):
            digest.update(np.ascontiguousarray(each.numpy()).data)
        return digest.hexdigest()

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


def write_codes(path: Path, codes: Mapping[str, Encoded]) -> None:
    """Write the codes of a layer's maps, in whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            **{
                f"{part} {field}": array
                for part, each in codes.items()
                for field, array in asdict(each).items()
                if array is not None
            },
        )
    partial.replace(path)


def read_codes(path: Path) -> dict[str, Encoded]:
    """The codes that were written; none if the file is absent or damaged."""
    try:
        with np.load(path) as file:
            fields: dict[str, dict[str, Any]] = {}
            for name in file.files:
                part, _, field = name.partition(" ")
                fields.setdefault(part, {"zeros": None})[field] = file[name]
            return {part: Encoded(**found) for part, found in fields.items()}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile):
        return {}


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
