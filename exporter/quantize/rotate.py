"""Rotates a model's hidden states so that 8-bit codes lose less. What the model computes stays the same.

A few channels of a hidden state are much larger than the others, so that one scale for a token leaves few
codes to the others. A rotation spreads them over all channels (QuaRot, arXiv 2404.00456). It is folded into
the weights, so a step has the same nodes as before. Rotated are:

- the residual stream. The scale of each norm is folded into the maps after it, so norms keep only the root
  mean square, which a rotation does not change. The last norm's scale is folded into lm_head: tied tables
  become two. Families with norms after attention or MLP keep their residual stream as it is.
- the values of each head, between v_proj and o_proj, if no gate is between.

The inputs of down_proj cannot be rotated, because they are a product of two maps. Each channel is divided by
a factor instead, folded into up_proj, so that their largest numbers become as similar as those of the weights
(SmoothQuant, arXiv 2211.10438).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..check import reference
from ..checkpoint import names
from ..checkpoint.dims import Dims
from ..checkpoint.open import Checkpoint
from ..checkpoint.tensors import Tensors
from ..codes import rotation
from .calibrated import batches, places, quick_products

SEED = 0
SMALLEST = 1e-5  # of a maximum or a column's length, so that an unused channel has a finite factor
ROOM = 4  # how far first tokens may increase the scale of a row of weights
NAME = re.compile(r"(model\.layers\.(\d+)\.|model\.mtp_layers\.0\.|mtp\.layers\.0\.)(.+)\.(weight|bias)")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] times an orthogonal matrix whose numbers are all of about the same size."""
    size = x.shape[-1]
    outer, inner = (torch.from_numpy(each) for each in rotation(size))
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    return (outer @ ((x * signs).unflatten(-1, (len(outer), len(inner))) @ inner)).flatten(-2)


def _array(x: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.numpy())


def keeps_residual(dims: Dims) -> bool:
    """Whether the residual stream cannot be rotated: norms after attention and MLP scale single channels."""
    return dims.quirks.norms.after_attention is not None or dims.quirks.norms.after_mlp is not None


class SplitTensors:
    """Tensors with q, k and v, gate and up as maps of their own, of a checkpoint that stores them joined."""

    def __init__(self, stored: Tensors, dims: Dims) -> None:
        keys, inner = dims.num_kv_heads * dims.head_dim, dims.intermediate_size
        parts = {
            names.QKV: {names.Q: dims.num_heads * dims.head_dim, names.K: keys, names.V: keys},
            names.GATE_UP: {names.GATE: inner, names.UP: inner},
        }
        self._stored = stored
        self._places: dict[str, tuple[str, slice]] = {}
        for name, shape in stored.shapes.items():
            start = 0
            joined = next((joined for joined in parts if f".{joined}." in name), name)
            for part, size in parts.get(joined, {name: shape[0]}).items():
                self._places[name.replace(joined, part)] = name, slice(start, start + size)
                start += size

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        stored = self._stored.shapes
        return {
            name: (rows.stop - rows.start, *stored[source][1:])
            for name, (source, rows) in self._places.items()
        }

    def read(self, name: str) -> np.ndarray:
        source, rows = self._places[name]
        return self._stored.read(source)[rows]


class RotatedTensors:
    """The tensors of a rotated model, of the dimensions `dims`. `factors` [layers, inputs] divide the inputs
    of down_proj; None: all are 1.
    """

    def __init__(self, stored: Tensors, dims: Dims, factors: torch.Tensor | None = None) -> None:
        if dims.quirks.fused:
            stored = SplitTensors(stored, dims)
            dims = replace(dims, quirks=replace(dims.quirks, fused=False))
        self._stored, self._knobs = stored, dims.quirks
        self._factors = torch.ones(dims.num_layers + 1, dims.intermediate_size)  # the last: of an MTP layer
        if factors is not None:
            self._factors[:-1] = factors
        self._head_dim = dims.head_dim
        self._turns = not keeps_residual(dims)
        self._tied = dims.tied
        self.dims = replace(dims, tied=dims.tied and not self._turns)
        norms = dims.quirks.norms
        self._norm_of = dict.fromkeys((*dims.quirks.qkv, *names.RECURRENT_IN), norms.before_attention)
        self._norm_of |= dict.fromkeys(dims.quirks.gate_up, norms.before_mlp)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(self._stored.shapes)
        if self.dims.mtp:
            final = shapes[names.FINAL_NORM]
            shapes |= {f"{names.PLAIN}{name}": final for name in (names.FINAL_NORM, self.dims.mtp.final)}
            shapes[names.MTP_HEAD] = shapes[names.EMBEDDING]
        return shapes if self.dims.tied else {names.HEAD: shapes[names.EMBEDDING], **shapes}

    def read(self, name: str) -> np.ndarray:
        if name.startswith(names.PLAIN):
            return self._stored.read(name.removeprefix(names.PLAIN))
        if (mtp := self.dims.mtp) and name in (mtp.hidden, mtp.token, mtp.final):
            return self._unit(name)
        if mtp and name == mtp.fused:
            norms = (mtp.token, mtp.hidden) if mtp.token_first else (mtp.hidden, mtp.token)
            halves = zip(self._read(name).chunk(2, -1), map(self._scale, norms), strict=True)
            joined = torch.cat([rotated(half * scale) for half, scale in halves], -1)
            return _array(rotated(joined.T).T)
        found = NAME.fullmatch(name)
        if found is None:
            return self._table(name)
        prefix, layer, part, kind = found[1], int(found[2] or -1), found[3], found[4]
        if part in self._norm_of.values():
            return self._unit(name) if self._turns else self._stored.read(name)
        if not names.is_linear(f".{part}.weight"):
            return self._stored.read(name)
        stored = self._read(name)
        if kind == "bias":
            return _array(self._after(layer, part, stored[:, None])[:, 0])
        return _array(self._after(layer, part, self._before(prefix, layer, part, stored)))

    def _table(self, name: str) -> np.ndarray:
        if not self._turns:
            return self._stored.read(name)
        if name == names.FINAL_NORM:
            return self._unit(name)
        if name not in (names.EMBEDDING, names.HEAD, names.MTP_HEAD):
            return self._stored.read(name)
        is_embedding = self._tied or name == names.EMBEDDING
        table = self._read(names.EMBEDDING if is_embedding else names.HEAD)
        if name == names.HEAD:
            table *= self._scale(names.FINAL_NORM)
        elif name == names.MTP_HEAD and self.dims.mtp:
            table *= self._scale(self.dims.mtp.final)
        return _array(rotated(table))

    def _before(self, prefix: str, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        """The numbers x [..., inputs] that meet the inputs of a map."""
        norm = self._norm_of.get(part)
        if norm is not None and self._turns:
            return rotated(x * self._scale(f"{prefix}{norm}.weight"))
        if part == names.O and not self._knobs.output_gate:
            return rotated(x.unflatten(-1, (-1, self._head_dim))).flatten(-2)
        return x * self._factors[layer] if part == names.DOWN else x

    def _after(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        """The numbers x [outputs, ...] that make the outputs of a map."""
        if part == names.V and not self._knobs.output_gate:
            return rotated(x.T.unflatten(-1, (-1, self._head_dim))).flatten(-2).T
        if part == names.UP:
            return x / self._factors[layer][:, None]
        is_added = part in (names.O, names.RECURRENT_OUT, names.DOWN)
        return rotated(x.T).T if is_added and self._turns else x

    def _read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self._stored.read(name), np.float32))

    def _scale(self, norm: str) -> torch.Tensor:
        return self._read(norm) + self._knobs.norm_offset

    def _unit(self, name: str) -> np.ndarray:
        return np.full(self._stored.shapes[name], 1 - self._knobs.norm_offset, np.float32)


def smoothing(
    dims: Dims,
    tensors: Tensors,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda done: None,
) -> torch.Tensor:
    """Factors [layers, inputs] of the inputs of down_proj, from the largest that token sequences give.
    `progress` is called with the number of layers that are done.
    """
    together = list(batches(sequences))
    factors = torch.ones(dims.num_layers, dims.intermediate_size)
    with torch.inference_mode(), quick_products():
        hidden = [reference.embedded(dims, tensors, batch) for batch in together]
        for i in range(dims.num_layers):
            progress(i)
            weights = reference.layer_weights(tensors, i)
            first, later = torch.full((2, dims.intermediate_size), SMALLEST)
            for at, (x, batch) in enumerate(zip(hidden, together, strict=True)):
                positions, owner = places(batch)
                inputs: list[torch.Tensor] = []

                def watch(part: str, value: torch.Tensor, inputs: list[torch.Tensor] = inputs) -> None:
                    if part == names.DOWN:
                        inputs.append(value.abs())

                hidden[at] = reference.layer(dims, i, weights, x, positions, owner, watch)
                first = torch.maximum(first, inputs[0][positions == 0].amax(0))
                if (rest := inputs[0][positions > 0]).numel():
                    later = torch.maximum(later, rest.amax(0))
            factors[i] = torch.nan_to_num(_factors(weights[f"{names.DOWN}.weight"], first, later), 1, 1, 1)
    return factors


def _factors(weight: torch.Tensor, first: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Factors [inputs] of the inputs of a weight [outputs, inputs], from the largest at first and at later
    tokens.

    Some inputs of first tokens are a thousand times larger than any later one, in channels that later tokens
    hardly use. Their factors are larger, so that the weights there have codes that are not near zero.
    """
    factors = (later / weight.norm(dim=0).clamp(min=SMALLEST)).sqrt()
    factors /= factors.log().mean().exp()
    scaled = weight.abs() * factors
    room = ROOM * scaled.amax(1).median() / scaled.amax(0)
    return factors * torch.minimum((first / later).sqrt(), room).clamp(min=1)


def rotated_checkpoint(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Checkpoint:
    """The checkpoint in rotated form, smoothed for what token sequences give; without any, not smoothed."""
    factors = smoothing(checkpoint.dims, checkpoint.tensors, sequences, progress) if sequences else None
    tensors = RotatedTensors(checkpoint.tensors, checkpoint.dims, factors)
    return replace(checkpoint, dims=tensors.dims, tensors=tensors)
