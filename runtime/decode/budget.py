"""How many rows a batch may have in the KV memory that it is given. Counts entries; allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SessionError
from .backend import GROWTH
from .row import Row

SLOTS = 64  # entries that a step of wider neighbours may want behind a row's last token


@dataclass(frozen=True, slots=True)
class KvBudget:
    """KV memory for at most `max_rows` rows: `num_bytes` of it, None for as much as comes.

    A batch allocates as many entries for each of its rows as the longest needs, of `entry_bytes` each. A row
    of this backend holds `max_capacity`; `fixed` says that it always does.
    """

    max_rows: int
    num_bytes: int | None = None
    entry_bytes: int = 1
    max_capacity: int = 0
    fixed: bool = False

    def num_rows(self, rows: Sequence[Row]) -> int:
        """Rows of a batch that holds `rows`: at least 1, at most `max_rows`."""
        if self.num_bytes is None:
            return self.max_rows
        most = self.num_bytes // max(map(self._row_bytes, rows))
        return max(1, min(self.max_rows, most))

    @property
    def num_entries(self) -> int:
        """Entries of all rows together."""
        if self.num_bytes is None:
            return self.max_rows * self.max_capacity
        return self.num_bytes // self.entry_bytes

    def most_entries(self, num_rows: int) -> int | None:
        """Entries that each of `num_rows` rows may have, None for any number."""
        if self.num_bytes is None or self.fixed:
            return None
        return self.num_bytes // (self.entry_bytes * num_rows)

    def check(self, row: Row) -> None:
        """Raise SessionError for a row that does not even fit alone."""
        if self.num_bytes is not None and (needed := self._row_bytes(row)) > self.num_bytes:
            raise SessionError(
                f"a prompt of {row.stats.prompt_tokens} tokens with max_new_tokens"
                f" {row.config.max_new_tokens} may take {needed / 1e6:.2f} MB of KV memory, this service"
                f" gives {self.num_bytes / 1e6:.2f} MB (kv_bytes); shorten the prompt or max_new_tokens"
            )

    def _row_bytes(self, row: Row) -> int:
        """What one row takes in the end, with the quarter more to which memory grows at once."""
        if self.fixed:
            return self.max_capacity * self.entry_bytes
        wanted = row.stats.prompt_tokens + row.config.max_new_tokens
        entries = min(wanted, self.max_capacity) + SLOTS
        return -(-entries * 5 // (4 * GROWTH)) * GROWTH * self.entry_bytes
