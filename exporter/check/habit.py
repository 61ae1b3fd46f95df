"""How a checkpoint writes JSON: with a space behind commas and colons, or without. Knows logits, no graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from ...runtime.bundle.manifest import Separators
from ..checkpoint.open import Checkpoint

# The same call in both forms: what stands before invites to go on in the same way, once for and once against.
SAMPLES = (
    '[{"name": "set_light", "arguments": {"room": "kitchen", "level": 40}}]',
    '[{"name":"set_light","arguments":{"room":"kitchen","level":40}}]',
)
CLEARLY = -1.0  # log-odds of a space, below which a checkpoint is believed to write none
VALUES = '"{[-0123456789tfn'  # what a value or a key begins with


def probes(checkpoint: Checkpoint) -> list[list[int]]:
    """Token ids to compute logits of; none where the tokenizer or the context has no room for them."""
    dims = checkpoint.dims
    tokenizer = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json)
    found = [tokenizer.encode(sample, add_special_tokens=False).ids for sample in SAMPLES]
    fits = all(0 < len(ids) <= dims.context_length and max(ids) < dims.vocab_size for ids in found)
    return found if fits else []


def separators(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], logits: Sequence[np.ndarray]
) -> Separators | None:
    """What the checkpoint itself writes behind a comma and behind a colon.

    `sequences` are those of `probes`, `logits` theirs, [tokens, vocab]. None where no token of a sample ends
    in a comma or in a colon, so that nothing can be told.
    """
    tokenizer = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json)
    width = logits[0].shape[-1] if logits else 0
    texts = [_written(tokenizer.id_to_token(token)) for token in range(width)]
    begins = {
        True: np.array([text[:1] == " " and text[1:2] in ("", *VALUES) for text in texts], bool),
        False: np.array([text[:1] != "" and text[:1] in VALUES for text in texts], bool),
    }
    odds: dict[str, list[float]] = {",": [], ":": []}
    for ids, of in zip(sequences, logits, strict=True):
        for i in range(len(ids) - 1):
            end = texts[ids[i]][-1:]
            if end in odds:
                odds[end].append(_log_sum(of[i], begins[True]) - _log_sum(of[i], begins[False]))
    if not odds[","] or not odds[":"]:
        return None
    item, key = (mark + ("" if np.mean(odds[mark]) < CLEARLY else " ") for mark in (",", ":"))
    return Separators(item, key)


def _written(token: str | None) -> str:
    """A token with the spaces that byte-level and metaspace tokenizers write as letters."""
    return (token or "").replace("\u0120", " ").replace("\u2581", " ")


def _log_sum(logits: np.ndarray, allowed: np.ndarray) -> float:
    values = logits[allowed].astype(np.float64)
    if not len(values):
        return -1e9
    return float(values.max() + np.log(np.exp(values - values.max()).sum()))
