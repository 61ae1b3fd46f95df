"""A small model's proposals for a large one (paper, section 4.6): it decodes ahead at a tau, the large one
verifies.

Knows the small model through its backend only, and nothing of the large one but the tokens it has settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from .backend import Backend
from .batch import Batch
from .config import GenerationConfig
from .feed import Feed
from .policy import widest_feeds
from .proposals import NONE, Proposals
from .row import Row

TAU = 0.5  # of the draft's own runs: what fails is verified away
LENGTH = 6  # proposals of one step, about
PIECE = 256  # known tokens of one forward of the draft


class Draft:
    """One row of the small model, kept in step with one row of the large one.

    Its KV entries stay valid as far as the tokens agree; the rest is written again. Raises what the backend
    raises.
    """

    def __init__(self, backend: Backend, block: int, mask_id: int, eos_ids: Sequence[int]) -> None:
        self._block, self._eos_ids = block, frozenset(eos_ids)
        self._batch = Batch(backend, 1, mask_id)
        config = GenerationConfig(tau=TAU, max_new_tokens=2**31, window="full")
        self._row = Row(0, (), config, ())
        self._batch.active.append(self._row)

    def propose(self, tokens: Sequence[int], most: int) -> Proposals:
        """Up to about LENGTH tokens that the small model would say; none where its context is full."""
        row = self._row
        agreed = next(
            (i for i, (a, b) in enumerate(zip(row.tokens, tokens, strict=False)) if a != b), len(tokens)
        )
        row.cursor = min(row.cursor, agreed, len(tokens) - 1)
        row.tokens = list(tokens)
        confidences: list[float] = []
        while len(confidences) < min(most, LENGTH) and self._batch.fits(row):
            for _ in range((row.num_pending - 1) // PIECE):
                self._batch.forward(0, [Feed(PIECE)])
                row.cursor += PIECE
            [feed] = widest_feeds([row], [self._batch.room(row)], self._block)
            event = row.take(self._batch.forward(0, [feed]), 0, feed)
            assert event is not None, "a draft follows no grammar"
            confidences += event.confidences
            if self._eos_ids.intersection(event.token_ids):
                break
        token_ids = tuple(row.tokens[len(tokens) :])
        return Proposals(token_ids[:most], tuple(confidences[:most]), "draft") if token_ids else NONE
