"""The paper's cache loop: whole finished blocks are committed, and rows wait for each other at block boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from ..errors import SessionError
from .backend import Backend
from .batch import Batch, Window
from .row import Accepted, Predictions, Row


def decode_blocks(
    backend: Backend, rows: Sequence[Row], block: int, mask_id: int, cache_block: int
) -> Iterator[list[Accepted]]:
    """Decode `rows` with block commit; yields what each inner step accepted.

    The cache holds whole blocks of `cache_block` tokens. An inner step feeds the block as it stands, accepted tokens and
    then masks, against the frozen cache; masks never reach past the block's end. When every row's block is full, one
    more forward writes the blocks into the cache; its last output is the prediction for the next block's first token.
    """
    if backend.max_slots is not None and cache_block > backend.max_slots:
        raise SessionError(
            f"a cache block of {cache_block} tokens does not fit a step of {backend.max_slots} slots; give a smaller one"
        )
    loop = _BlockLoop(Batch(backend, len(rows), mask_id), block, cache_block)
    for row in rows:
        yield from loop.prefill(row)
    while loop.batch.active:
        yield loop.step()
        loop.batch.drop_finished()
        full = all(loop.is_full(row) for row in loop.batch.active)
        if full and (ended := loop.commit()):
            yield ended


class _BlockLoop:
    def __init__(self, batch: Batch, block: int, cache_block: int) -> None:
        self.batch, self.block, self.cache_block = batch, block, cache_block
        self.first: dict[
            int, Predictions
        ] = {}  # by row: the prediction that the last commit made for the block's first token
        self.started = perf_counter()

    def length(self, row: Row) -> int:
        """Tokens in the row's present block; the last block before the end of the context is shorter, even empty."""
        return min(self.cache_block, self.batch.backend.max_capacity - row.cursor)

    def is_full(self, row: Row) -> bool:
        return row.num_pending >= max(1, self.length(row))

    def prefill(self, row: Row) -> Iterator[list[Accepted]]:
        """Put the whole prompt into the cache; yields nothing-accepted after each chunk but the last."""
        self.batch.active.append(row)
        begun = perf_counter()
        for _ in self.batch.prefill(row):
            yield []
        if row.finish_reason is None:
            self.write([row])
        self.batch.drop_finished()
        row.stats.prefill_time = perf_counter() - begun

    def write(self, rows: Sequence[Row]) -> None:
        """Make the pending tokens of neighbouring `rows` final and keep the prediction that follows each."""
        windows = [Window(row.num_pending, 0) for row in rows]
        output = self.batch.forward(self.batch.active.index(rows[0]), windows)
        for i, (row, window) in enumerate(zip(rows, windows, strict=True)):
            row.cursor += window.known
            row.stats.forwards += 1
            self.first[row.index] = Predictions.of(output, i, 1, row.config.metric)

    def commit(self) -> list[Accepted]:
        """Write every full block into the cache; returns the rows that this ends, because their context is full."""
        ended = [row.finish("capacity") for row in self.batch.active if self.length(row) == 0]
        self.batch.drop_finished()
        if self.batch.active:
            self.write(self.batch.active)
        return ended

    def step(self) -> list[Accepted]:
        """One inner step for the rows whose block is not full; the others wait."""
        batch = self.batch
        short = [i for i, row in enumerate(batch.active) if not self.is_full(row)]
        events: list[Accepted] = []
        windows = {i: self.window(batch.active[i]) for i in short}
        fed = [i for i in short if windows[i].slots]
        if fed:
            span = range(fed[0], fed[-1] + 1)
            # A waiting row between two working ones feeds a scratch mask: the cursor does not move, nothing is kept.
            for i in fed:
                batch.active[i].stats.forwards += 1
            output = batch.forward(span.start, [windows[i] if i in fed else Window(0, 1) for i in span])
        for i in short:
            row, window = batch.active[i], windows[i]
            count = window.masks + min(window.known, 1)
            made = Predictions.of(output, i - span.start, count, row.config.metric) if window.slots else None
            if window.known:
                assert made is not None
                events.append(row.take(made))
            else:
                first = self.first[row.index]
                events.append(row.take(first if made is None else first.then(made)))
            self.clock(row)
        return events

    def window(self, row: Row) -> Window:
        known = row.num_pending
        return Window(known, min(row.look_ahead(self.block), max(1, self.length(row) - known)) - 1)

    def clock(self, row: Row) -> None:
        elapsed = perf_counter() - self.started
        if row.stats.time_to_first_token == 0:
            row.stats.time_to_first_token = elapsed
        row.stats.decode_time = elapsed - row.stats.time_to_first_token
