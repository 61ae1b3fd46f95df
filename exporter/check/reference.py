"""A plain torch forward of a checkpoint with one layer in memory at a time: the reference of the self-check.

It is simple rather than fast.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from ..checkpoint import names
from ..checkpoint.dims import Dims, Recurrent
from ..checkpoint.stock import Rope
from ..checkpoint.tensors import Tensors, chunks


def logits(
    dims: Dims,
    tensors: Tensors,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int], None] | None = None,
) -> list[np.ndarray]:
    """fp32 logits [len(sequence), vocab] of each token sequence, with causal attention and without a cache.

    `progress` is called with 1 after each layer.
    """
    lengths = [len(sequence) for sequence in sequences]
    with torch.inference_mode():
        # The sequences are concatenated so that each weight is read once; the mask separates them.
        positions, owner = places(lengths)
        # Vocabulary tables are read by rows or in parts: in fp32 they may be larger than all else.
        x = embedded(dims, tensors, sequences)
        for i in range(dims.num_layers):
            x = layer(dims, i, layer_weights(tensors, i), x, positions, owner)
            if progress is not None:
                progress(1)
        normed = head_input(dims, tensors, x)
        parts = []
        for rows in chunks(tensors.read(names.EMBEDDING if dims.tied else names.HEAD)):
            head = torch.from_numpy(np.array(rows, np.float32))
            product = normed @ head.T * dims.quirks.logit_factor
            parts.append(_capped(product, dims.quirks.logit_cap).numpy())
        return np.split(np.concatenate(parts, -1), np.cumsum(lengths)[:-1])


def places(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and owners [tokens] of concatenated sequences of these lengths."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat([torch.arange(length) for length in lengths]), owner


def embedded(dims: Dims, tensors: Tensors, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The input of the first layer [tokens, hidden] for the concatenated sequences."""
    table = tensors.read(names.EMBEDDING)
    rows = np.array(table[[token for ids in sequences for token in ids]], np.float32)
    return torch.from_numpy(rows) * dims.quirks.embedding_factor


def head_input(dims: Dims, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The input of lm_head [tokens, hidden], from the output x of the last layer."""
    return _rms(x, _read(tensors, names.FINAL_NORM) + dims.quirks.norm_offset, dims.rms_norm_eps)


def layer_weights(tensors: Tensors, i: int) -> dict[str, torch.Tensor]:
    """Layer i's tensors in fp32, by their names without the layer's prefix."""
    return {
        name.removeprefix(names.layer(i)): _read(tensors, name)
        for name in tensors.shapes
        if name.startswith(names.layer(i)) and not name.endswith(names.ROTARY_COPY)
    }


def _read(tensors: Tensors, name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(tensors.read(name), np.float32))


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


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

    `watch` is called with the name of each Linear map and its input, [tokens, inputs].
    """
    return finished(steps(dims, i, weights, x, positions, owner), watch)


Steps = Generator[tuple[Sequence[str], torch.Tensor], None, torch.Tensor]


def finished(run: Steps, watch: Callable[[str, torch.Tensor], None] | None = None) -> torch.Tensor:
    """The output of a layer, once its remaining steps have run."""
    while True:
        try:
            parts, value = next(run)
        except StopIteration as done:
            output: torch.Tensor = done.value
            return output
        if watch is not None:
            for part in parts:
                watch(part, value)


def steps(
    dims: Dims,
    i: int,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    positions: torch.Tensor,
    owner: torch.Tensor,
) -> Steps:
    """A layer, step by step: yields the Linear maps that come next, and their input, before they are computed
    with what `weights` then holds.
    """
    quirks = dims.quirks

    def linear(part: str, value: torch.Tensor) -> torch.Tensor:
        return F.linear(value, weights[f"{part}.weight"], weights.get(f"{part}.bias"))

    def norm(part: str | None, value: torch.Tensor) -> torch.Tensor:
        if part is None:
            return value
        return _rms(value, weights[f"{part}.weight"] + quirks.norm_offset, dims.rms_norm_eps)

    def mixed(normed: torch.Tensor) -> torch.Tensor:
        """The values that attention mixes, [tokens, heads * head_dim]."""
        queries = dims.num_heads * dims.head_dim * (2 if quirks.output_gate else 1)
        sizes = [queries, *[dims.num_kv_heads * dims.head_dim] * 2]
        q, k, v = torch.cat([linear(part, normed) for part in quirks.qkv], -1).split(sizes, -1)
        if quirks.output_gate:
            q, gate = (x.flatten(1) for x in q.unflatten(-1, (dims.num_heads, 2, -1)).unbind(2))
        heads = quirks.head_norms
        if heads is not None and heads.whole:
            q, k = norm(heads.q, q), norm(heads.k, k)
        # [tokens, heads, head_dim]
        q, k, v = (value.unflatten(-1, (-1, dims.head_dim)) for value in (q, k, v))
        if heads is not None and not heads.whole and not heads.rotated:
            q, k = norm(heads.q, q), norm(heads.k, k)
        if (rope := dims.rope(i)) is not None:
            q, k = (_rotate(rope, value, positions, quirks.interleaved) for value in (q, k))
        if heads is not None and heads.rotated:
            q, k = norm(heads.q, q), norm(heads.k, k)
        if quirks.query_growth is not None:
            beta, length = quirks.query_growth
            q = q * (1 + beta * torch.log(1 + torch.floor(positions / length)))[:, None, None]
        distance = positions[:, None] - positions[None, :]
        mask = (distance >= 0) & (owner[:, None] == owner[None, :])
        window = dims.windows[i]
        if window is not None:
            mask &= distance < window
        groups = dims.num_heads // dims.num_kv_heads
        keys, values = (t.transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
        scores = _capped(q.transpose(0, 1) @ keys.mT * dims.attention_scale, quirks.attention_cap)
        made = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)
        return made * torch.sigmoid(gate) if quirks.output_gate else made

    def gated(normed: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([linear(part, normed) for part in quirks.gate_up], -1).chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if quirks.activation == "gelu_tanh" else F.silu(gate)) * up

    maps, output = dims.mixer(i)
    value = norm(quirks.norms.before_attention, x)
    yield maps, value
    if dims.recurrent is not None and dims.is_recurrent(i):
        inputs = [linear(part, value) for part in maps]
        value = _recurrent(dims.recurrent, weights, inputs, positions, owner, dims.rms_norm_eps)
    else:
        value = mixed(value)
    yield (output,), value
    x = x + norm(quirks.norms.after_attention, linear(output, value)) * quirks.residual_factor
    value = norm(quirks.norms.before_mlp, x)
    yield quirks.gate_up, value
    value = gated(value)
    yield (names.DOWN,), value
    made = norm(quirks.norms.after_mlp, linear(names.DOWN, value))
    return x + made * quirks.residual_factor


def _recurrent(
    net: Recurrent,
    weights: dict[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    positions: torch.Tensor,
    owner: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """A gated delta net, [tokens, value_heads * value_dim]; `inputs` are the products of its input maps."""
    size = int(owner.max()) + 1, int(positions.max()) + 1

    def by_sequence(x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(*size, x.shape[-1])
        rows[owner, positions] = x
        return rows  # [sequences, positions, ...], zeros after the end of a sequence

    mixed, a, b = (by_sequence(inputs[part]) for part in (0, 2, 3))
    kernel = weights[f"{names.CONVOLUTION}.weight"]
    past = F.pad(mixed.mT, (net.kernel - 1, 0))
    mixed = F.silu(F.conv1d(past, kernel, groups=net.mixed)).mT
    keys = net.key_heads * net.key_dim
    q, k, v = mixed.split([keys, keys, net.value_heads * net.value_dim], -1)
    q, k, v = (
        x.unflatten(-1, (heads, -1))
        for x, heads in ((q, net.key_heads), (k, net.key_heads), (v, net.value_heads))
    )
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(net.value_heads // net.key_heads, 2) for x in (q * net.key_dim**-0.5, k))
    decay = (-weights[names.DECAY].exp() * F.softplus(a + weights[names.DECAY_BIAS])).exp()
    beta = b.sigmoid()
    state = torch.zeros(size[0], net.value_heads, net.key_dim, net.value_dim)
    made = torch.empty_like(v)
    for t in range(size[1]):
        state *= decay[:, t, :, None, None]
        change = (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]) * beta[:, t, :, None]
        state += k[:, t, :, :, None] * change[:, :, None]
        made[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
    gate = F.silu(inputs[1]).unflatten(-1, (net.value_heads, -1))
    return (_rms(made[owner, positions], weights[f"{names.RECURRENT_NORM}.weight"], eps) * gate).flatten(1)


def _rotate(rope: Rope, x: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    angles = positions.to(torch.float32)[:, None] * torch.from_numpy(rope.inv_freq)
    cos, sin = (f(angles)[:, None, :] * rope.scale for f in (torch.cos, torch.sin))
    size = 2 * angles.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        pairs = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([pairs, rest], -1)
