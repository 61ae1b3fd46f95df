"""The active rows and their KV memory: one forward over neighbouring rows, and how many rows fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ..errors import SessionError
from .backend import GROWTH, Backend, Feed, StepOutput
from .row import Accepted, Row


@contextmanager
def error_boundary(rows: Sequence[Row], events: list[Accepted]) -> Iterator[None]:
    """If the body raises, `rows` end, and no others; their last events are added to `events`.

    It catches BaseException, because a panic of a Rust library is not an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        events += [row.fail(error) for row in rows]


SLOTS = 64  # of a decode step within a KV budget: a wider row adds entries to all rows of its step


class Batch:
    """Row i of the cache belongs to `active[i]`; rows that run together are neighbours."""

    def __init__(self, backend: Backend, num_rows: int, mask_id: int) -> None:
        self.backend, self.num_rows, self.mask_id = backend, num_rows, mask_id
        self.cache = backend.new_cache(num_rows)
        self.active: list[Row] = []
        self.step_seconds = 0.0  # of the last step

    def forward(self, first: int, feeds: Sequence[Feed]) -> StepOutput:
        """Run one step on the active rows first, first + 1, ... with these feeds.

        Output 0 of a row belongs to its last pending token; then come its proposals and its masks. The output
        of a slot predicts the token at the next position. Only the block loop (blocks.py) has rows without
        pending tokens: their outputs are those of their masks.
        """
        rows = self.active[first : first + len(feeds)]
        slots = max([feed.slots for feed in feeds])
        outputs = max(1, *[feed.outputs for feed in feeds])
        # Lists, and one array of each at the end: after a forward the processor's caches are cold, and each
        # call of numpy costs microseconds.
        input_ids, output_index, cursors = [], [], []
        for row, feed in zip(rows, feeds, strict=True):
            pending, cursor = feed.pending, row.cursor
            tokens = row.tokens[cursor : cursor + pending]
            if feed.proposals:
                tokens += row.proposals.token_ids[: feed.proposals]
            rest = slots - len(tokens)
            masks = row.draft.ids(cursor + len(tokens), rest) if row.draft else [self.mask_id] * rest
            input_ids.append(tokens + masks)
            slot_index = list(range(pending - 1 if pending else 0, feed.slots))
            output_index.append(slot_index + [0] * (outputs - len(slot_index)))
            cursors.append(cursor)
        self.cache.reserve(max(cursors) + slots)
        want_logits = any(row.wants_logits for row in rows)
        ids, kv_length, index = [np.array(v, np.int64) for v in (input_ids, cursors, output_index)]
        begun = perf_counter()
        output = self.backend.step(self.cache, first, ids, kv_length, index, want_logits)
        self.step_seconds = perf_counter() - begun
        return output

    def room(self, row: Row) -> int:
        """Slots of a step after the row's pending tokens; below 0 if these do not fit."""
        pending = row.num_pending
        room = self.backend.max_capacity - row.cursor - pending
        if self.backend.max_slots is not None:
            room = min(room, self.backend.max_slots - pending)
        if self.backend.max_outputs is not None:
            room = min(room, self.backend.max_outputs - 1)
        return room

    def fits(self, row: Row) -> bool:
        """Whether the row's pending tokens fit in the context."""
        return len(row.tokens) <= self.backend.max_capacity

    def recall(self, place: int, chunk: int, max_entries: int | None = None) -> None:
        """Load the beginning of the row's prompt from the prefix cache.

        `max_entries`: entries to which a saved prefix may widen the rows, None for any number.
        """
        row = self.active[place]
        if row.stem is not None:
            capacity = self.backend.max_capacity
            row.cursor = row.stem.recall(self.cache, place, row.tokens, chunk, capacity, max_entries)
            row.stats.cached_tokens = row.cursor

    def keep(self, place: int) -> None:
        """Offer the row's final entries to the prefix cache."""
        row = self.active[place]
        if row.stem is not None:
            row.stem.keep(self.cache, place, row.tokens)

    def move(self, source: int, target: int) -> None:
        """Move the row at `source` to `target`, with its final entries unless it has ended."""
        if source != target:
            row = self.active[target] = self.active[source]
            if row.finish_reason is None:
                self.cache.move(source, target, row.cursor)


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How many rows fit in `num_bytes` of KV memory; None for no limit but `max_rows`.

    A batch allocates as many entries for each row as its longest row may need, of `entry_bytes` each.
    `max_capacity`: most entries of a row. `fixed`: a row always takes that many.
    """

    max_rows: int
    num_bytes: int | None = None
    entry_bytes: int = 1
    max_capacity: int = 0
    fixed: bool = False

    @property
    def short_bytes(self) -> int:
        """Half of an equal share: `max_rows` such rows leave half of the memory to longer ones."""
        return (self.num_bytes or 0) // (2 * self.max_rows)

    @property
    def short_entries(self) -> int | None:
        """Tokens of a prompt and an answer that fit in `short_bytes`, None for any number."""
        if self.num_bytes is None or self.fixed:
            return None
        return self.short_bytes // self.entry_bytes // GROWTH * GROWTH * 4 // 5 - SLOTS

    @property
    def max_slots(self) -> int | None:
        """Slots of a decode step that `row_bytes` counts on, None for any number."""
        return None if self.num_bytes is None or self.fixed else SLOTS

    @property
    def num_entries(self) -> int:
        """Entries of all rows together."""
        if self.num_bytes is None:
            return self.max_rows * self.max_capacity
        return self.num_bytes // self.entry_bytes

    def max_entries(self, num_rows: int) -> int | None:
        """Entries that each of `num_rows` rows may have, None for any number."""
        if self.num_bytes is None or self.fixed:
            return None
        return self.num_bytes // (self.entry_bytes * num_rows)

    def check(self, row: Row) -> None:
        """Raise SessionError for a row that does not fit even alone."""
        if self.num_bytes is not None and (num_bytes := self.row_bytes(row)) > self.num_bytes:
            raise SessionError(
                f"a prompt of {row.stats.prompt_tokens} tokens with max_new_tokens"
                f" {row.config.max_new_tokens} may take {num_bytes / 1e6:.2f} MB of KV memory, this service"
                f" gives {self.num_bytes / 1e6:.2f} MB (kv_bytes); shorten the prompt or max_new_tokens"
            )

    def row_bytes(self, row: Row) -> int:
        """The most that one row takes, with the quarter by which memory grows at least."""
        if self.fixed:
            return self.max_capacity * self.entry_bytes
        length = row.stats.prompt_tokens + row.config.max_new_tokens
        entries = min(length, self.max_capacity) + SLOTS
        return -(-entries * 5 // (4 * GROWTH)) * GROWTH * self.entry_bytes
