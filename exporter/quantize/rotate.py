"""Rotates a model's hidden states so that 8 bits keep more of them. What the model computes stays the same.

A few channels of a hidden state are much larger than the others, and one scale for a token then leaves the others few
codes. A rotation spreads them over all channels (QuaRot, arXiv 2404.00456). It is folded into the weights before and
after, so a step has the same nodes as before:

- the residual stream, with a norm's scale folded into the maps behind it. Vocabulary tables are rotated too; the scale
  of the last norm is folded into lm_head, so tied tables become two. Only where nothing but a norm's root mean square,
  which a rotation keeps, stands between the stream and the maps: not in families with norms after attention or MLP.
- the values of each head, between v_proj and o_proj.
- the inputs of down_proj cannot be rotated, because a product of two maps is taken before it. They are divided by a
  factor for each channel instead, folded into up_proj, which makes typical maxima similar (SmoothQuant, arXiv
  2211.10438).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..check import reference
from ..checkpoint.architecture import names
from ..checkpoint.architecture.dims import Dims
from ..checkpoint.tensors import Tensors

LARGEST_HADAMARD = 64
SEED = 0
SMOOTHING = 0.5  # of the maxima that move from the inputs of down_proj to its weights
SMALLEST = 1e-5  # of a maximum, so that an unused channel has a finite factor
NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] times an orthogonal matrix whose numbers are all of about the same size."""
    size = x.shape[-1]
    inner = math.gcd(size, LARGEST_HADAMARD)
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    parts = (x * signs).unflatten(-1, (size // inner, inner)) @ _hadamard(inner)
    return (_hartley(size // inner) @ parts).flatten(-2)


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


def _hartley(size: int) -> torch.Tensor:
    """The Hartley transform, which has flat rows for every size."""
    index = torch.arange(size, dtype=torch.float64)
    angles = 2 * math.pi * (index[:, None] * index % size) / size
    return ((angles.cos() + angles.sin()) / math.sqrt(size)).float()


def keeps_residual(dims: Dims) -> str | None:
    """Why the residual stream of a family cannot be rotated, or None."""
    norms = dims.knobs.norms
    if norms.after_attention is not None or norms.after_mlp is not None:
        return "its norms after attention and MLP scale single channels"
    return None


class RotatedTensors:
    """The tensors of a rotated model, of the dimensions `dims`. `factors` [layers, inputs] divide the inputs of
    down_proj.
    """

    def __init__(self, stored: Tensors, dims: Dims, factors: torch.Tensor) -> None:
        self._stored, self._knobs, self._factors = stored, dims.knobs, factors
        self._head_dim, self._values = dims.head_dim, dims.num_kv_heads * dims.head_dim
        self._turns = keeps_residual(dims) is None
        self._tied = dims.tied
        self.dims = replace(dims, tied=dims.tied and not self._turns)
        norms = dims.knobs.norms
        self._norm_of = dict.fromkeys(dims.knobs.qkv, norms.before_attention)
        self._norm_of |= dict.fromkeys(dims.knobs.gate_up, norms.before_mlp)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(self._stored.shapes)
        return shapes if self.dims.tied else {names.HEAD: shapes[names.EMBEDDING], **shapes}

    def read(self, name: str) -> np.ndarray:
        found = NAME.fullmatch(name)
        if found is None:
            return self._table(name)
        layer, part, kind = int(found[1]), found[2], found[3]
        if part in self._norm_of.values():
            return self._unit(name) if self._turns else self._stored.read(name)
        if not names.is_linear(f".{part}.weight"):
            return self._stored.read(name)
        stored = self._read(name)
        if kind == "bias":
            return self._after(layer, part, stored[:, None])[:, 0].contiguous().numpy()
        return self._after(layer, part, self._before(layer, part, stored)).contiguous().numpy()

    def pair(self, weight: str, down: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A [rank, in] and B [out, rank] of an adapter of a Linear weight, for the rotated model."""
        found = NAME.fullmatch(weight)
        assert found is not None, weight
        layer, part = int(found[1]), found[2]
        before = self._before(layer, part, torch.from_numpy(down))
        return before.numpy(), self._after(layer, part, torch.from_numpy(up)).contiguous().numpy()

    def _table(self, name: str) -> np.ndarray:
        if not self._turns:
            return self._stored.read(name)
        if name == names.FINAL_NORM:
            return self._unit(name)
        if name not in (names.EMBEDDING, names.HEAD):
            return self._stored.read(name)
        table = self._read(names.EMBEDDING if self._tied else name)
        if name == names.HEAD:
            table *= self._read(names.FINAL_NORM) + self._knobs.norm_offset
        return rotated(table).numpy()

    def _before(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        """The numbers x [..., inputs] that meet the inputs of a map."""
        norm = self._norm_of.get(part)
        if norm is not None and self._turns:
            return rotated(x * (self._read(names.weight(layer, norm)) + self._knobs.norm_offset))
        if part == names.O:
            return rotated(x.unflatten(-1, (-1, self._head_dim))).flatten(-2)
        return x * self._factors[layer] if part == names.DOWN else x

    def _after(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        """The numbers x [outputs, ...] that make the outputs of a map."""
        if part in (names.V, names.QKV):
            kept, values = x[: -self._values], x[-self._values :]
            heads = values.T.unflatten(-1, (-1, self._head_dim))
            return torch.cat([kept, rotated(heads).flatten(-2).T])
        if part in (names.UP, names.GATE_UP):
            factors = self._factors[layer]
            kept, up = x[: -len(factors)], x[-len(factors) :]
            return torch.cat([kept, up / factors[:, None]])
        return rotated(x.T).T if part in (names.O, names.DOWN) and self._turns else x

    def _read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self._stored.read(name), np.float32))

    def _unit(self, name: str) -> np.ndarray:
        return np.full(self._stored.shapes[name], 1 - self._knobs.norm_offset, np.float32)


def smoothing(dims: Dims, tensors: Tensors, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Factors [layers, inputs] of the inputs of down_proj, from those that token sequences give.

    First tokens are left out: some of their inputs are a thousand times larger than any other token's.
    """
    positions, owner = reference.places([len(sequence) for sequence in sequences])
    factors = torch.ones(dims.num_layers, dims.intermediate_size)
    with torch.inference_mode():
        x = reference.embedded(dims, tensors, sequences)
        for i in range(dims.num_layers):
            weights = reference.layer_weights(tensors, i)

            def watch(part: str, value: torch.Tensor, i: int = i, weights: dict[str, torch.Tensor] = weights) -> None:
                if part == names.DOWN and (positions > 0).any():
                    inputs = value[positions > 0].abs().amax(0).clamp(min=SMALLEST)
                    columns = weights[f"{part}.weight"].abs().amax(0).clamp(min=SMALLEST)
                    factor = inputs**SMOOTHING / columns ** (1 - SMOOTHING)
                    factors[i] = factor / factor.log().mean().exp()

            x = reference.layer(dims, i, weights, x, positions, owner, watch)
    return factors
