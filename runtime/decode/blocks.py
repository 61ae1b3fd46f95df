"""The paper's cache loop: whole blocks are committed, and rows wait for each other at block boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SessionError
from .backend import Backend, Feed, StepOutput
from .batch import error_boundary
from .row import Accepted, Predictions, Row
from .schedule import Limits, Schedule

UNUSED = Feed(0, 0, 1)  # of a row that waits between two working ones; recognized by identity


def check_blocks(backend: Backend, rows: Sequence[Row], cache_block: int) -> None:
    """Raise SessionError for what this loop cannot do."""
    if backend.max_slots is not None and cache_block > backend.max_slots:
        raise SessionError(
            f"a cache block of {cache_block} tokens does not fit a step of {backend.max_slots} slots;"
            " give a smaller one"
        )
    if any(row.config.is_structured for row in rows):
        raise SessionError(
            "a grammar needs cursor commit: forced tokens may go beyond a block; leave commit as it is"
        )
    if any(row.config.exact for row in rows):
        raise SessionError(
            "exact mode needs cursor commit: block commit feeds accepted tokens against a frozen cache and"
            " verifies none; leave commit as it is, or give a tau"
        )


class BlockSchedule(Schedule):
    """The same loop with another commit: cursors move when whole blocks are full.

    The cache holds whole blocks of `cache_block` tokens. An inner step feeds the accepted tokens of the
    current block and then masks, at most up to the block's end, against the frozen cache. When every row's
    block is full, one more forward writes the blocks into the cache; its last output predicts the first token
    of the next block.
    """

    def __init__(self, backend: Backend, block: int, mask_id: int, limits: Limits, cache_block: int) -> None:
        super().__init__(backend, block, mask_id, limits)
        self._cache_block = cache_block
        # By row: the last commit's prediction of the block's first token.
        self._first: dict[int, Predictions] = {}

    def _length(self, row: Row) -> int:
        """Tokens of the row's current block; at the end of the context fewer, even none."""
        return min(self._cache_block, self.backend.max_capacity - row.cursor)

    def _is_full(self, row: Row) -> bool:
        return row.num_pending >= max(1, self._length(row))

    def _first_feed(self, row: Row) -> Feed:
        return Feed(row.num_pending)

    def _finish_prompt(self, row: Row, output: StepOutput, i: int, feed: Feed) -> None:
        """A commit: pending tokens are final, and the next prediction is kept."""
        row.cursor += feed.pending
        row.stats.forwards += 1
        self._first[row.index] = Predictions.of(output, i, 1, row.config.metric)

    def _decode(self, rows: list[Row]) -> list[Accepted]:
        incomplete = [i for i, row in enumerate(rows) if not self._is_full(row)]
        if not incomplete:
            return self._commit(rows)
        feeds = {i: self._inner_feed(rows[i]) for i in incomplete}
        events: list[Accepted] = []
        for i in incomplete:
            if not feeds[i].slots:  # one-token mode at the start of a block: the commit predicted its token
                with error_boundary([rows[i]], events):
                    events += filter(None, [rows[i].accept(self._first[rows[i].index])])
        working = [i for i in incomplete if feeds[i].slots]
        if working:
            # Neighbouring rows run together. The cursor of a row that waits does not move.
            span = range(working[0], working[-1] + 1)
            span_feeds = [feeds[i] if i in working else UNUSED for i in span]
            events += self._run([rows[i] for i in span], span_feeds, self._accept_inner)
        return sorted(events, key=lambda event: event.row)

    def _commit(self, rows: list[Row]) -> list[Accepted]:
        """Write every full block into the cache. Rows whose context is full end."""
        events = [row.finish("capacity") for row in rows if self._length(row) == 0]
        self._drop_finished()
        if rows := self._decoding():
            events += self._run(rows, [Feed(row.num_pending) for row in rows], self._finish_prompt)
        return events

    def _inner_feed(self, row: Row) -> Feed:
        pending = row.num_pending
        return Feed(pending, 0, min(row.max_masks(self.block), max(1, self._length(row) - pending) - 1))

    def _accept_inner(self, row: Row, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        if feed is UNUSED:
            return None
        row.stats.forwards += 1
        predictions = Predictions.of(output, i, feed.outputs, row.config.metric)
        return row.accept(predictions if feed.pending else self._first[row.index].then(predictions))
