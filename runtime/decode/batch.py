"""Active rows and their KV memory: arrays in, one forward, arrays out. Knows no order of work and moves no
cursor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .backend import Backend, StepOutput
from .feed import Feed
from .row import Row


class Batch:
    """Row i of the cache belongs to `active[i]`; rows that run together are neighbours."""

    def __init__(self, backend: Backend, num_rows: int, mask_id: int) -> None:
        self.backend, self.num_rows, self.mask_id = backend, num_rows, mask_id
        self.cache = backend.new_cache(num_rows)
        self.active: list[Row] = []

    def forward(self, first: int, feeds: Sequence[Feed]) -> StepOutput:
        """Run one step on the active rows first, first + 1, ... with these feeds.

        Output j of a row belongs to its last known token for j = 0, then to its proposals, then to its masks;
        a row with no known tokens has its masks' outputs from j = 0 on.
        """
        rows = self.active[first : first + len(feeds)]
        slots = max([feed.slots for feed in feeds])
        outputs = max(1, *[feed.outputs for feed in feeds])
        # Lists, and one array of each at the end: behind a forward nothing is in the processor's caches, and
        # each of numpy's functions that is touched costs microseconds then.
        input_ids, output_index, cursors = [], [], []
        for row, feed in zip(rows, feeds, strict=True):
            known, cursor = feed.known, row.cursor
            fed = row.tokens[cursor : cursor + known]
            if feed.proposals:
                fed += row.proposals.token_ids[: feed.proposals]
            input_ids.append(fed + [self.mask_id] * (slots - known - feed.proposals))
            asked = list(range(known - 1 if known else 0, feed.slots))
            output_index.append(asked + [0] * (outputs - len(asked)))
            cursors.append(cursor)
        self.cache.reserve(max(cursors) + slots)
        want_logits = any(row.wants_logits for row in rows)
        ids, kv_length, index = [np.array(each, np.int64) for each in (input_ids, cursors, output_index)]
        return self.backend.step(self.cache, first, ids, kv_length, index, want_logits)

    def room(self, row: Row) -> int:
        """Slots that a step has behind the row's known tokens; below 0 where they do not even fit."""
        known = row.num_pending
        room = self.backend.max_capacity - row.cursor - known
        if self.backend.max_slots is not None:
            room = min(room, self.backend.max_slots - known)
        if self.backend.max_outputs is not None:
            room = min(room, self.backend.max_outputs - 1)
        return room

    def fits(self, row: Row) -> bool:
        """Whether the row's pending tokens still have room in the context."""
        return len(row.tokens) <= self.backend.max_capacity

    def recall(self, place: int, piece: int, most: int | None = None) -> None:
        """Begin a row with what the store of prefixes has of its prompt, if it has a share in one. `most`:
        entries to which saved ones may widen the rows, None for any number.
        """
        row = self.active[place]
        if row.stem is not None:
            capacity = self.backend.max_capacity
            row.cursor = row.stem.recall(self.cache, place, row.tokens, piece, capacity, most)
            row.stats.cached_tokens = row.cursor

    def keep(self, place: int) -> None:
        """Let the store of prefixes have the row's final entries."""
        row = self.active[place]
        if row.stem is not None:
            row.stem.keep(self.cache, place, row.tokens)

    def move(self, source: int, target: int) -> None:
        """The row at `source` gets the place `target`, with its final entries unless it is over."""
        if source != target:
            row = self.active[target] = self.active[source]
            if row.finish_reason is None:
                self.cache.move(source, target, row.cursor)
