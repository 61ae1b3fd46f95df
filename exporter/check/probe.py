"""Checks that a mask predicts the token after its own position, as in a causal model trained with masks.

SDAR and I-DLM checkpoints look alike, but an SDAR mask predicts its own token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.errors import ExportError
from ..checkpoint.open import Checkpoint

# A text that any model can continue, because it repeats itself.
TEXT = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday\n" * 4
TOKENS = 48  # at most, of the text
PLACES = 12  # the masks that are tried, near the end
FEW = PLACES // 4  # as many may be right by chance


@dataclass(frozen=True, slots=True)
class Probe:
    """Known text and one mask after it, several times: `sequences`. `own` and `after` are the tokens at the
    mask's position and at the next one.
    """

    sequences: tuple[tuple[int, ...], ...] = ()
    own: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Probe:
        """The probe of a checkpoint whose config names the number of trained masks, else an empty one."""
        from tokenizers import Tokenizer

        mask = checkpoint.vocabulary.mask_token_id
        if mask is None or not checkpoint.trained_masks:
            return cls()
        ids = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json).encode(TEXT).ids
        ids = [i for i in ids if i < checkpoint.dims.vocab_size][
            : min(TOKENS, checkpoint.dims.context_length)
        ]
        places = [c for c in range(max(1, len(ids) - PLACES - 1), len(ids) - 1) if ids[c] != ids[c + 1]]
        return cls(
            tuple((*ids[:c], mask) for c in places),
            tuple(ids[c] for c in places),
            tuple(ids[c + 1] for c in places),
        )

    def require_next(self, logits: Sequence[np.ndarray]) -> None:
        """Raise ExportError if the masks, whose logits [vocab] are given, say their own tokens."""
        said = [int(row.argmax()) for row in logits]
        own, after = (
            sum(a == b for a, b in zip(said, tokens, strict=True)) for tokens in (self.own, self.after)
        )
        if own > max(after, FEW):
            raise ExportError(
                f"in {own} of {len(said)} places a mask predicts its own token, in {after} the next one:"
                " this checkpoint was trained with bidirectional attention in blocks, as SDAR, and this"
                " causal loop cannot run it (docs/families.md). Nothing was written"
            )
