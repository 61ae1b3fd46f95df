"""The two streams in one forward: the text as it is, and windows of masks over its answers.

Sequences are laid out one after the other in one row, without padding. Five numbers of each token decide who
attends to whom, in a dense mask (sdpa) or in blocks (flex attention).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rows import Sequence
from torch import Tensor

from mars_export.exporter.checkpoint.families import FAMILIES

Batch = list[tuple[Sequence, list[tuple[int, int]]]]  # sequences with their windows of masks, [start, stop)
CLEAN = 0
DECAY = 0.8  # of a kept row's masks, over the mask before: free text is accepted a few tokens at a time
FLEX_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences of one forward: T tokens, of which R have an output that is scored."""

    ids: Tensor  # [T]
    positions: Tensor  # [T] of masks too: those of the tokens in their places
    documents: Tensor  # [T] the sequence
    windows: Tensor  # [T] the window of a mask, or CLEAN
    limits: Tensor  # [T] clean tokens at positions below it are visible
    outputs: Tensor  # [R]
    targets: Tensor  # [R] the tokens after them
    noisy: Tensor  # [R] bool, the output is a mask's
    weights: Tensor  # [R] mean 1 over the masks of a sequence
    kept: Tensor  # [R] bool, of a sequence that learns the base model's probabilities


def grid(sequence: Sequence, width: int, offset: int) -> list[tuple[int, int]]:
    """Windows of `width` masks over an answer, the first one cut to `offset` masks if that is positive. The
    mask at the last place but one predicts the last token."""
    start, last = sequence.start, len(sequence.tokens) - 1
    edges = [start, *range(start + (offset or width), last, width), last] if start < last else []
    return list(pairwise(edges))


def lay_out(batch: Batch, mask_id: int, device: Any = "cpu", multiple: int = 1) -> Pack:
    """Each sequence without its last token, then its windows; padded to a multiple of tokens."""
    fed: list[tuple[int, int, int, int, int]] = []
    scored: list[tuple[int, int, bool, float, bool]] = []
    window = CLEAN
    for document, (sequence, spans) in enumerate(batch, 1):
        first, tokens, kept = len(fed), sequence.tokens, sequence.kept
        fed += [(token, p, document, CLEAN, p + 1) for p, token in enumerate(tokens[:-1])]
        scored += [(first + p - 1, tokens[p], False, 1.0, kept) for p in range(sequence.start, len(tokens))]
        factor = DECAY if kept else 1.0
        total = sum(factor**depth for start, stop in spans for depth in range(stop - start))
        scale = sum(stop - start for start, stop in spans) / total if spans else 0.0
        for start, stop in spans:
            window += 1
            for p in range(start, stop):
                scored.append((len(fed), tokens[p + 1], True, scale * factor ** (p - start), kept))
                fed.append((mask_id, p, document, window, start))
    fed += [(mask_id, p, 0, CLEAN, p + 1) for p in range(-len(fed) % multiple)]
    columns = [*zip(*fed, strict=True), *zip(*scored, strict=True)]
    return Pack(*(torch.tensor(column, device=device) for column in columns))


def rule(pack: Pack, reach: int | None) -> Callable[..., Tensor]:
    """Whether token q attends to token k, as flex attention asks. `reach` is the model's sliding window:
    positions further back are invisible to masks as they are to text."""

    def visible(_batch: Any, _head: Any, q: Tensor, k: Tensor) -> Tensor:
        distance = pack.positions[q] - pack.positions[k]
        is_clean = pack.windows[k] == CLEAN
        before = is_clean & (pack.positions[k] < pack.limits[q])
        own = ~is_clean & (pack.windows[k] == pack.windows[q]) & (distance >= 0)
        seen = (pack.documents[q] == pack.documents[k]) & (before | own)
        return seen if reach is None else seen & (distance < reach)

    return visible


def attention(config: Any, pack: Pack, flex: bool) -> Any:
    """The attention mask as the model's class takes it: one, or one for each kind of layer."""

    def made(reach: int | None) -> Any:
        visible, every = rule(pack, reach), torch.arange(len(pack.ids), device=pack.ids.device)
        if not flex:
            return visible(None, None, every[:, None], every[None])[None, None]
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(visible, None, None, len(every), len(every), device=str(every.device))

    windows = FAMILIES[config.model_type].windows
    if windows == "typed":
        kinds = {"full_attention": None, "sliding_attention": config.sliding_window}
        return {kind: made(kinds[kind]) for kind in set(config.layer_types)}
    return made(config.sliding_window if windows == "all" else None)


def forward(model: Any, batch: Batch, mask_id: int) -> tuple[Pack, Tensor]:
    """The layout and the logits of its scored outputs, [R, V] in fp32."""
    flex = model.config._attn_implementation == "flex_attention"
    pack = lay_out(batch, mask_id, model.device, FLEX_BLOCK if flex else 1)
    out = model(
        input_ids=pack.ids[None],
        position_ids=pack.positions[None],
        attention_mask=attention(model.config, pack, flex),
        logits_to_keep=pack.outputs,
        use_cache=False,
    )
    return pack, out.logits[0].float()
