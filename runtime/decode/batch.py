"""The decoding loop: prefill, then steps. A generator of accepted tokens; owns cursors and KV rows; speaks token ids only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from .backend import Backend, StepOutput
from .policy import Policy
from .row import Accepted, Predictions, Row

PREFILL_CHUNK = 256  # prompt tokens of one prefill forward


@dataclass(frozen=True, slots=True)
class Window:
    """What a row feeds into one step: `known` tokens from its cursor on, then `masks` masks."""

    known: int
    masks: int

    @property
    def slots(self) -> int:
        return self.known + self.masks


class Batch:
    """Active rows and their KV memory. Row i of the cache belongs to `active[i]`; a finished row leaves at once."""

    def __init__(self, backend: Backend, num_rows: int, mask_id: int) -> None:
        self.backend, self.mask_id = backend, mask_id
        self.cache = backend.new_cache(num_rows)
        self.active: list[Row] = []

    def forward(self, first: int, windows: Sequence[Window]) -> StepOutput:
        """Run one step on the active rows first, first + 1, ... with these windows. Moves no cursor.

        Output j of a row belongs to its last known token for j = 0 and to its mask j - 1 after that; a row with no known
        tokens has its masks' outputs from j = 0 on.
        """
        slots, outputs = max(w.slots for w in windows), max(w.masks + min(w.known, 1) for w in windows)
        input_ids = np.full((len(windows), slots), self.mask_id, np.int64)
        output_index = np.zeros((len(windows), max(outputs, 1)), np.int64)
        rows = self.active[first : first + len(windows)]
        kv_length = np.array([row.cursor for row in rows], np.int64)
        for i, (row, window) in enumerate(zip(rows, windows, strict=True)):
            input_ids[i, : window.known] = row.tokens[row.cursor : row.cursor + window.known]
            start = max(window.known - 1, 0)
            output_index[i, : window.slots - start] = np.arange(start, window.slots)
        self.cache.reserve(int(kv_length.max()) + slots)
        want_logits = any(row.config.needs_logits for row in rows)
        return self.backend.step(self.cache, first, input_ids, kv_length, output_index, want_logits)

    def drop_finished(self) -> None:
        """Free finished rows: the last active row moves into each gap, so that active rows stay neighbours."""
        for i in reversed(range(len(self.active))):
            if self.active[i].finish_reason is None:
                continue
            last = self.active.pop()
            if i < len(self.active):
                self.cache.move(len(self.active), i, last.cursor)
                self.active[i] = last

    def prefill(self, row: Row) -> Iterator[None]:
        """Make KV entries final for the row's pending tokens, all but the last chunk; yields after each chunk."""
        chunk = min(PREFILL_CHUNK, self.backend.max_slots or PREFILL_CHUNK)
        until = row.cursor + (row.num_pending - 1) // chunk * chunk
        while row.cursor < until and row.finish_reason is None:
            self.forward(self.active.index(row), [Window(chunk, 0)])
            row.cursor += chunk
            row.stats.prefill_forwards += 1
            yield


def decode(
    backend: Backend, rows: Sequence[Row], block: int, mask_id: int, policy: Policy | None = None
) -> Iterator[list[Accepted]]:
    """Decode `rows` with cursor commit; yields, for each step, what it accepted in each row that took part, nothing for a prefill chunk.

    A step feeds [tokens accepted last step | masks] from each row's own cursor: the known tokens' KV become final in the
    same forward that makes the next predictions (paper: "cursor-based cache management"). The last prefill chunk carries
    masks too, so the first step already yields a run. A row may be given a new config, or a finish_reason from outside,
    between two steps. `policy` chooses the masks of rows whose window is not fixed; without one they get full windows.
    """
    batch = Batch(backend, len(rows), mask_id)
    started = perf_counter()
    for row in rows:
        batch.active.append(row)
        begun = perf_counter()
        for _ in batch.prefill(row):
            yield []
        if row.finish_reason is None:
            yield [_first_step(batch, row, block, started, begun)]
        batch.drop_finished()
    while batch.active:
        yield step(batch, block, policy)
        for row in batch.active:
            row.stats.decode_time = perf_counter() - started - row.stats.time_to_first_token
        batch.drop_finished()


def step(batch: Batch, block: int, policy: Policy | None) -> list[Accepted]:
    """One forward over all active rows, and what each accepts."""
    ended = [
        row.finish("capacity") for row in batch.active if row.finish_reason is None and not fits(batch, row)
    ]
    batch.drop_finished()
    if not batch.active:
        return ended
    windows = windows_of(batch, batch.active, block, policy)
    output = batch.forward(0, windows)
    return ended + [
        commit(row, window, output, i)
        for i, (row, window) in enumerate(zip(batch.active, windows, strict=True))
    ]


def _first_step(batch: Batch, row: Row, block: int, started: float, begun: float) -> Accepted:
    window = window_of(batch, row, block)
    output = batch.forward(batch.active.index(row), [window])
    accepted = commit(row, window, output, 0)
    row.stats.prefill_time = perf_counter() - begun
    row.stats.time_to_first_token = perf_counter() - started
    return accepted


def fits(batch: Batch, row: Row) -> bool:
    """Whether the row's pending tokens still have room in the context."""
    return len(row.tokens) <= batch.backend.max_capacity


def windows_of(batch: Batch, rows: Sequence[Row], block: int, policy: Policy | None) -> list[Window]:
    """The windows of a decode step: as wide as may be, or with the masks that `policy` chooses."""
    widest = [window_of(batch, row, block) for row in rows]
    if policy is None:
        return widest
    masks = policy.masks(rows, [w.masks for w in widest])
    return [Window(w.known, m) for w, m in zip(widest, masks, strict=True)]


def window_of(batch: Batch, row: Row, block: int) -> Window:
    """All pending tokens of a row, and as many masks as it may have and there is room for."""
    known = row.num_pending
    room = batch.backend.max_capacity - row.cursor - known
    if batch.backend.max_slots is not None:
        room = min(room, batch.backend.max_slots - known)
    return Window(known, max(0, min(row.look_ahead(block) - 1, room)))


def commit(row: Row, window: Window, output: StepOutput, i: int) -> Accepted:
    """Make the window's known tokens final and accept from batch row `i` of the step's output."""
    row.cursor += window.known
    row.stats.forwards += 1
    return row.take(Predictions.of(output, i, window.masks + 1, row.config.metric))
