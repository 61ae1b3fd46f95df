"""Computes how many sequences fit in the KV memory of a service."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from ..errors import SessionError
from .backend import GROWTH
from .sequence import Sequence

SLOTS = 64  # of a decode step within a KV budget: a wider sequence adds entries to all sequences of its step


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How many sequences fit in `num_bytes` of KV memory; None for no limit but `max_rows`.

    by_row: memory that is never written costs nothing, as on a host. Sequences then start by the entries that
        each may need. Else a batch allocates as many for each as the longest needs, and each has an equal
        share.
    entry_bytes: of one entry. max_capacity: most entries of a sequence. fixed: a sequence always takes them.
    """

    max_rows: int
    num_bytes: int | None = None
    entry_bytes: int = 1
    max_capacity: int = 0
    fixed: bool = False
    by_row: bool = True

    @property
    def num_entries(self) -> int:
        """Entries of all sequences together."""
        if self.num_bytes is None:
            return self.max_rows * self.max_capacity
        return self.num_bytes // self.entry_bytes

    @property
    def row_entries(self) -> int:
        """Most entries of one sequence."""
        return self.num_entries if self.by_row else self.num_entries // self.max_rows

    @property
    def half_share(self) -> int:
        """Entries of half an equal share: `max_rows` such sequences leave half to longer ones."""
        return self.num_entries // self.max_rows // 2

    @property
    def short_entries(self) -> int | None:
        """Tokens of a prompt and an answer that leave memory to longer ones where these can use it: those of
        half an equal share, else of a whole one. None for any number.
        """
        if self.num_bytes is None or self.fixed:
            return None
        if self.by_row:
            return self.half_share - SLOTS
        return self.row_entries // GROWTH * GROWTH * 4 // 5 - SLOTS

    @property
    def max_slots(self) -> int | None:
        """Slots of a decode step that `entries` counts on, None for any number."""
        return None if self.num_bytes is None or self.fixed else SLOTS

    @property
    def max_entries(self) -> int | None:
        """Entries to which a saved prefix may widen all sequences, None for any number."""
        return None if self.num_bytes is None or self.fixed or self.by_row else self.row_entries

    def check(self, seq: Sequence) -> None:
        """Raise SessionError for a sequence that does not fit even alone."""
        if self.num_bytes is not None and self.entries(seq) > self.row_entries:
            need, given = (n * self.entry_bytes / 1e6 for n in (self.entries(seq), self.row_entries))
            raise SessionError(
                f"a prompt of {seq.stats.prompt_tokens} tokens with max_new_tokens"
                f" {seq.config.max_new_tokens} may need {need:.2f} MB of KV memory, but this service"
                f" allows {given:.2f} MB (kv_bytes); shorten the prompt or max_new_tokens"
            )

    def entries(self, seq: Sequence) -> int:
        """The most that one sequence takes; of memory that is allocated, with the quarter by which it grows
        at least.
        """
        if self.fixed:
            return self.max_capacity
        length = min(seq.stats.prompt_tokens + seq.config.max_new_tokens, self.max_capacity) + SLOTS
        return length if self.by_row else -(-length * 5 // (4 * GROWTH)) * GROWTH

    def left(self, seqs: abc.Sequence[Sequence]) -> int | None:
        """Entries that a further sequence may have beside `seqs`, None for any number."""
        if self.num_bytes is None or not self.by_row:
            return None
        return self.num_entries - sum(self.entries(seq) for seq in seqs)
