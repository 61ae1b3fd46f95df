"""A plain torch forward of a checkpoint, one layer in memory at a time.

The yardstick of the self-check; fast it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from ..checkpoint import names
from ..checkpoint.family import Dims
from ..checkpoint.tensors import Tensors, chunks


def logits(
    dims: Dims,
    tensors: Tensors,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[], None] | None = None,
) -> list[np.ndarray]:
    """fp32 logits [len(sequence), vocab] of each token sequence, plain causal, no cache.

    `progress` is called after each layer.
    """
    lengths = [len(sequence) for sequence in sequences]
    with torch.inference_mode():
        # All sequences behind each other, so that each weight is read once; the mask keeps them apart.
        positions, owner = places(lengths)
        # Of the vocabulary tables only rows, or a part at a time: in fp32 they may be more than all else.
        x = embedded(tensors, sequences)
        for i in range(dims.num_layers):
            x = layer(dims, i, layer_weights(tensors, i), x, positions, owner)
            if progress is not None:
                progress()
        normed = _rms(x, _read(tensors, names.FINAL_NORM), dims.rms_norm_eps)
        parts = []
        for rows in chunks(tensors.read(names.EMBEDDING if dims.tied else names.HEAD)):
            head = torch.from_numpy(np.array(rows, np.float32))
            parts.append((normed @ head.T).numpy())
        return np.split(np.concatenate(parts, -1), np.cumsum(lengths)[:-1])


def places(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and owners [tokens] of sequences of such lengths behind each other."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat([torch.arange(length) for length in lengths]), owner


def embedded(tensors: Tensors, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The rows of the embedding [tokens, hidden] of all sequences, one behind the other."""
    table = tensors.read(names.EMBEDDING)
    return torch.from_numpy(np.array(table[[token for ids in sequences for token in ids]], np.float32))


def layer_weights(tensors: Tensors, i: int) -> dict[str, torch.Tensor]:
    """Layer i's tensors in fp32, by the part of their names behind the layer's."""
    return {
        name.removeprefix(names.layer(i)): _read(tensors, name)
        for name in tensors.shapes
        if name.startswith(names.layer(i)) and not name.endswith(names.ROTARY_COPY)
    }


def _read(tensors: Tensors, name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(tensors.read(name), np.float32))


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def layer(
    dims: Dims,
    i: int,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    positions: torch.Tensor,
    owner: torch.Tensor,
    watch: Callable[[str, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Layer i on x [tokens, hidden]; token t is at `positions[t]` of sequence `owner[t]`.

    `watch` is called with the name of each Linear map and what goes into it, [tokens, inputs].
    """

    def linear(part: str, value: torch.Tensor) -> torch.Tensor:
        if watch is not None:
            watch(part, value)
        return F.linear(value, weights[f"{part}.weight"], weights.get(f"{part}.bias"))

    def norm(part: str, value: torch.Tensor) -> torch.Tensor:
        return _rms(value, weights[f"{part}.weight"], dims.rms_norm_eps)

    normed = norm(names.INPUT_NORM, x)
    # [tokens, heads, head_dim]
    q, k, v = (
        linear(part, normed).unflatten(-1, (-1, dims.head_dim)) for part in (names.Q, names.K, names.V)
    )
    if dims.qk_norm:
        q, k = norm(names.Q_NORM, q), norm(names.K_NORM, k)
    q, k = _rotate(dims, q, positions), _rotate(dims, k, positions)
    distance = positions[:, None] - positions[None, :]
    mask = (distance >= 0) & (owner[:, None] == owner[None, :])
    window = dims.windows[i]
    if window is not None:
        mask &= distance < window
    groups = dims.num_heads // dims.num_kv_heads
    keys, values = (t.transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
    mixed = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], mask)[0]
    x = x + linear(names.O, mixed.transpose(0, 1).flatten(1))
    normed = norm(names.POST_NORM, x)
    return x + linear(names.DOWN, F.silu(linear(names.GATE, normed)) * linear(names.UP, normed))


def _rotate(dims: Dims, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions.to(torch.float32)[:, None] * torch.from_numpy(dims.rope.inv_freq)
    cos, sin = (f(angles)[:, None, :] * dims.rope.scale for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
