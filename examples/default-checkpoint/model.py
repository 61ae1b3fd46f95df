"""The Llama forward with LoRA and two streams, written by hand: flat tokens, attention by sequence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

MASK_ID = 16
WINDOW = 7  # masks of a window at block 8: the last known token predicts the first of the eight tokens
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True)
class Sequence2:
    """One example laid out for the two-stream forward: clean tokens, then windows of masks."""

    ids: Tensor  # [T] token ids, MASK_ID in the noisy part
    positions: Tensor  # [T]
    visible: Tensor  # [T, T] bool, row attends to column
    outputs: Tensor  # [R] rows whose output is scored
    targets: Tensor  # [R] the token each of them predicts
    noisy: Tensor  # [R] bool, the row is a mask
    weights: Tensor  # [R] of the row's loss; mean 1 over the masks, and over the clean rows
    taught: bool = False  # clean rows learn the base model's probabilities instead of the token

    def clean(self) -> Sequence2:
        """The sequence without its masks."""
        rows = ~self.noisy
        length = int(self.outputs[rows].max()) + 1
        return replace(
            self,
            ids=self.ids[:length],
            positions=self.positions[:length],
            visible=self.visible[:length, :length],
            outputs=self.outputs[rows],
            targets=self.targets[rows],
            noisy=self.noisy[rows],
            weights=self.weights[rows],
        )


def windows(prompt: int, length: int, offset: int) -> list[tuple[int, int]]:
    """The grid of mask windows [start, stop) over the response, the first one cut to `offset` masks when
    offset > 0."""
    edges = (
        [prompt, *range(prompt + offset, length - 1, WINDOW)]
        if offset
        else [*range(prompt, length - 1, WINDOW)]
    )
    edges = [edge for edge in edges if edge < length - 1]
    return list(zip(edges, [*edges[1:], length - 1], strict=False)) if edges else []


def lay_out(
    tokens: Sequence[int], prompt: int, spans: Iterable[tuple[int, int]], decay: float = 1.0
) -> Sequence2:
    """Clean tokens[:-1], then one noisy window per span; a mask at position q predicts tokens[q + 1].

    A mask of span [s, e) attends to clean positions below s and, causally, to the masks of its own span. Each
    mask's loss counts `decay` times that of the one before it in its span.
    """
    spans = list(spans)
    clean = len(tokens) - 1
    masks = [q for start, stop in spans for q in range(start, stop)]
    starts = [start for start, stop in spans for _ in range(start, stop)]
    group = [g for g, (start, stop) in enumerate(spans) for _ in range(start, stop)]
    ids = torch.tensor([*tokens[:-1], *[MASK_ID] * len(masks)])
    positions = torch.tensor([*range(clean), *masks])
    total = clean + len(masks)
    visible = torch.zeros(total, total, dtype=torch.bool)
    visible[:clean, :clean] = torch.ones(clean, clean, dtype=torch.bool).tril()
    visible[clean:, :clean] = torch.arange(clean) < torch.tensor(starts).reshape(-1, 1)
    own = torch.tensor(group)
    noisy_at = positions[clean:]
    visible[clean:, clean:] = (own[:, None] == own) & (noisy_at[:, None] >= noisy_at)
    outputs = torch.tensor([*range(prompt - 1, clean), *range(clean, total)])
    targets = torch.tensor([*tokens[prompt:], *[tokens[q + 1] for q in masks]])
    falling = torch.tensor([decay ** (q - start) for start, stop in spans for q in range(start, stop)])
    falling = falling * (len(masks) / falling.sum()) if masks else falling
    weights = torch.cat((torch.ones(len(outputs) - len(masks)), falling))
    return Sequence2(ids, positions, visible, outputs, targets, outputs >= clean, weights)


class Lora(nn.Module):
    """A frozen linear map plus a trained low-rank one. Products in the frozen weight's type, the trained
    matrices in fp32."""

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight = weight  # [out, in], frozen
        self.scale, self.off = alpha / rank, False
        self.a = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.off:
            return F.linear(x, self.weight)
        a, b = self.a.to(x.dtype), self.b.to(x.dtype)
        return torch.addmm(F.linear(x, self.weight), F.linear(x, a), b.t(), alpha=self.scale)


class Layer(nn.Module):
    """One transformer layer over flat tokens."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        index: int,
        config: dict,
        rank: int,
        alpha: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        at = f"model.layers.{index}."
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        self.norm_in = weights[at + "input_layernorm.weight"]
        self.norm_mid = weights[at + "post_attention_layernorm.weight"]
        self.maps = nn.ModuleDict(
            {p.split(".")[1]: Lora(weights[f"{at}{p}.weight"].to(dtype), rank, alpha) for p in PROJECTIONS}
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int], bias: list[Tensor]) -> Tensor:
        kind = self.maps["q_proj"].weight.dtype  # of the products; x, the norms and the rotation are fp32
        h = F.rms_norm(x, x.shape[-1:], self.norm_in, self.eps).to(kind)  # [T, C]
        q = rotate(self.maps["q_proj"](h).view(-1, self.heads, self.width), cos, sin)
        k = rotate(self.maps["k_proj"](h).view(-1, self.kv_heads, self.width), cos, sin)
        v = self.maps["v_proj"](h).view(-1, self.kv_heads, self.width)
        parts = []
        for qs, ks, vs, mask in zip(q.split(lengths), k.split(lengths), v.split(lengths), bias, strict=True):
            parts.append(attend(qs, ks, vs, mask))
        x = x + self.maps["o_proj"](torch.cat(parts))
        h = F.rms_norm(x, x.shape[-1:], self.norm_mid, self.eps).to(kind)
        return x + self.maps["down_proj"](F.silu(self.maps["gate_proj"](h)) * self.maps["up_proj"](h))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of one sequence, [T, H * D]; q [T, H, D], k and v [T, K, D], bias [T, T]. Heads that share
    keys are rows of one product; the softmax is in fp32."""
    length, heads, width = q.shape
    groups = heads // k.shape[1]
    q = (
        (q * width**-0.5)
        .view(length, -1, groups, width)
        .permute(1, 2, 0, 3)
        .reshape(-1, groups * length, width)
    )
    scores = torch.bmm(q, k.permute(1, 2, 0)).view(-1, groups, length, length)
    weights = (scores + bias).softmax(-1, dtype=torch.float32).to(v.dtype)
    out = torch.bmm(weights.view(-1, groups * length, length), v.transpose(0, 1))
    return out.view(-1, groups, length, width).permute(2, 0, 1, 3).reshape(length, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout, computed in fp32; x [T, H, D], cos and sin [T, 1, D]."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


class TwoStream(nn.Module):
    """The base model, its LoRA maps and the trained mask row."""

    def __init__(
        self, base: Path, rank: int = 32, alpha: float = 64.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        config = json.loads((base / "config.json").read_text())
        weights = {name: tensor.float() for name, tensor in load_file(base / "model.safetensors").items()}
        self.rank, self.alpha, self.eps, self.dtype = rank, alpha, config["rms_norm_eps"], dtype
        self.embedding = weights["model.embed_tokens.weight"]  # [V, C], tied
        self.norm = weights["model.norm.weight"]
        self.layers = nn.ModuleList(
            Layer(weights, i, config, rank, alpha, dtype) for i in range(config["num_hidden_layers"])
        )
        self.mask_row = nn.Parameter(self.embedding.mean(0))
        width = self.layers[0].width
        self.frequencies = config["rope_theta"] ** -(torch.arange(0, width, 2).float() / width)

    @torch.no_grad()
    def base(self, batch: Sequence[Sequence2], vocabulary: Tensor) -> Tensor:
        """Logits of the clean rows of every sequence without the adapter, [sum R, V]."""
        maps = [m for m in self.modules() if isinstance(m, Lora)]
        clean = [s.clean() for s in batch]
        for m in maps:
            m.off = True
        try:
            return self(clean, vocabulary)
        finally:
            for m in maps:
                m.off = False

    def forward(self, batch: Sequence[Sequence2], vocabulary: Tensor | None = None) -> Tensor:
        """Logits of the scored rows of every sequence, [sum R, V]; the mask token is excluded.

        With `vocabulary`, only those ids are scored, in that order: training need not pay for all 49152.
        """
        lengths = [len(s.ids) for s in batch]
        ids = torch.cat([s.ids for s in batch])
        angles = torch.cat([s.positions for s in batch])[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        bias = [
            torch.zeros(s.visible.shape, dtype=self.dtype).masked_fill_(~s.visible, float("-inf"))
            for s in batch
        ]
        x = torch.where((ids == MASK_ID)[:, None], self.mask_row, self.embedding[ids])
        for layer in self.layers:
            x = layer(x, cos, sin, lengths, bias)
        starts = [0]
        for length in lengths[:-1]:
            starts.append(starts[-1] + length)
        rows = torch.cat([s.outputs + start for s, start in zip(batch, starts, strict=True)])
        x = F.rms_norm(x[rows], x.shape[-1:], self.norm, self.eps)
        if vocabulary is not None:
            return F.linear(x.to(self.dtype), self.embedding[vocabulary].to(self.dtype)).float()
        logits = F.linear(x, self.embedding)
        closed = torch.zeros(logits.shape[-1])
        closed[MASK_ID] = float("-inf")
        return logits + closed
