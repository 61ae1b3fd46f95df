"""KV entries of what was read before, by its token ids. Knows no text, and devices by their caches only."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from sys import byteorder
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import bucket

if TYPE_CHECKING:
    from .backend import Cache

FOUR_BYTES = "I"  # an array's type of 32-bit numbers wherever C's int has four bytes
SPARE = 64  # entries behind a prompt that are reserved with it: the first steps need them

Group = tuple[str, int]
"""Who may share: the salt, and the size of the pieces where entries depend on it (else 1)."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a cache made of its first `length` entries."""

    data: Any
    length: int


@dataclass(slots=True)
class Entry:
    """KV entries of exactly the ids of `key`. A `fixed` one stays when one comes that begins with it."""

    group: Group
    key: bytes
    saved: Saved
    num_bytes: int
    fixed: bool


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """queries: prompts that were looked up; hits: those of which something was there. query_tokens: of all
    these prompts; hit_tokens: those of them that were there.

    saved, evicted: entries that came, and that went because memory was short; failed: those that could not be
    copied. entries, num_bytes: what is there now.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    saved: int = 0
    evicted: int = 0
    failed: int = 0
    entries: int = 0
    num_bytes: int = 0


class Prefixes:
    """Entries of at most `budget` bytes; the least recently used go first. May be used from any thread.

    `firm_slots` as a backend says it. An entry that is being copied when it goes lives on until that is done.
    """

    def __init__(self, budget: int, firm_slots: int | None = None) -> None:
        self.budget, self.firm_slots = budget, firm_slots
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Group, bytes], Entry] = OrderedDict()  # the last is the latest used
        self._sorted: dict[Group, list[bytes]] = {}  # neighbours begin alike
        self._num_bytes = 0  # of the entries and of those that are being copied
        self._counts = dict.fromkeys(
            ("queries", "hits", "query_tokens", "hit_tokens", "saved", "evicted", "failed"), 0
        )

    @property
    def stats(self) -> PrefixStats:
        with self._lock:
            return PrefixStats(**self._counts, entries=len(self._entries), num_bytes=self._num_bytes)

    def stem(self, salt: str = "", marks: Sequence[int] = ()) -> Stem | None:
        """A row's share; `marks`: lengths of its prompt that others may begin with. None without a budget."""
        return Stem(self, salt, marks) if self.budget > 0 else None

    def clear(self) -> None:
        """Forget everything that was saved."""
        with self._lock:
            for name in list(self._entries):
                self._drop(name)

    def count(self, query_tokens: int, hit_tokens: int) -> None:
        """Note what became of one prompt that was looked up."""
        with self._lock:
            for name, more in (("queries", 1), ("hits", hit_tokens > 0)):
                self._counts[name] += more
            self._counts["query_tokens"] += query_tokens
            self._counts["hit_tokens"] += hit_tokens

    def match(self, group: Group, ids: Sequence[int], marks: Sequence[int] = ()) -> tuple[Saved, int] | None:
        """The entry that has most of the beginning of `ids`, and how much; None where none has any.

        Entries of the lengths `marks` are taken for used, too.
        """
        key = _key(ids)
        with self._lock:
            length, best = _nearest(self._sorted.get(group, []), key)
            if not length:
                return None
            if (group, key[: 4 * length]) in self._entries:
                best = key[: 4 * length]  # no more than is needed: a longer one may grow old
            self._entries.move_to_end((group, best))
            saved = self._entries[group, best].saved
            for mark in marks:  # behind what it is in, so that the part which others need stays the longest
                if (group, key[: 4 * mark]) in self._entries:
                    self._entries.move_to_end((group, key[: 4 * mark]))
            return saved, length

    def save(
        self,
        group: Group,
        ids: Sequence[int],
        num_bytes: int,
        copy: Callable[[], Saved],
        *,
        fixed: bool = False,
    ) -> None:
        """Take in what `copy` makes, unless it is there or has no room. What fails is counted, no more."""
        key = _key(ids)
        with self._lock:
            if not key or num_bytes > self.budget or self._is_there(group, key, fixed):
                return
            self._drop_beginning(group, key)
            while self._entries and self._num_bytes + num_bytes > self.budget:
                self._drop(next(iter(self._entries)))
                self._counts["evicted"] += 1
            if self._num_bytes + num_bytes > self.budget:
                return  # others are copying
            self._num_bytes += num_bytes
        saved = None
        try:
            with suppress(Exception):  # memory, most likely: the answer does not depend on it
                saved = copy()
        finally:
            with self._lock:
                self._num_bytes -= num_bytes
                if saved is None:
                    self._counts["failed"] += 1
                elif not self._is_there(group, key, fixed):  # another row may have been faster
                    self._drop_beginning(group, key)
                    self._add(Entry(group, key, saved, num_bytes, fixed))

    # --- with the lock held ---

    def _is_there(self, group: Group, key: bytes, fixed: bool) -> bool:
        if fixed:
            entry = self._entries.get((group, key))
            if entry is not None:
                entry.fixed = True
                self._entries.move_to_end((group, key))
            return entry is not None
        keys = self._sorted.get(group, [])
        if not _begins_one(keys, key):
            return False
        at = bisect_left(keys, key)
        self._entries.move_to_end((group, keys[at]))
        return True

    def _add(self, entry: Entry) -> None:
        keys = self._sorted.setdefault(entry.group, [])
        keys.insert(bisect_left(keys, entry.key), entry.key)
        self._entries[entry.group, entry.key] = entry
        self._num_bytes += entry.num_bytes
        self._counts["saved"] += 1

    def _drop_beginning(self, group: Group, key: bytes) -> None:
        """The entry that `key` begins with goes: its neighbour, since what stands between begins with it."""
        keys = self._sorted.get(group, [])
        at = bisect_left(keys, key) - 1
        if at >= 0 and key.startswith(keys[at]) and not self._entries[group, keys[at]].fixed:
            self._drop((group, keys[at]))

    def _drop(self, name: tuple[Group, bytes]) -> None:
        entry = self._entries.pop(name)
        self._num_bytes -= entry.num_bytes
        keys = self._sorted[entry.group]
        keys.pop(bisect_left(keys, entry.key))
        if not keys:
            del self._sorted[entry.group]


class Stem:
    """What one row takes from the store and gives to it. Used by the thread that runs the row.

    `firm` counts the row's leading entries that have the bits which any other row's would have: only they are
    given. Nothing behind the row's cursor is among them.
    """

    def __init__(self, store: Prefixes, salt: str, marks: Sequence[int]) -> None:
        self._store, self._salt, self._marks = store, salt, tuple(marks)
        self._group: Group | None = None  # until the row begins
        self.firm = 0

    def recall(
        self,
        cache: Cache,
        place: int,
        tokens: Sequence[int],
        piece: int,
        capacity: int,
        most_entries: int | None = None,
    ) -> int:
        """Load what the store has of `tokens`, and return how many that is. Something is always left to feed.

        What is left takes the very steps, or firm ones, that a row takes which begins at 0 and reads by
        `piece`. A long entry is left alone where rows as wide would exceed `most_entries`.
        """
        firm_slots = self._store.firm_slots
        if firm_slots is not None and piece < firm_slots:
            return 0  # its steps give other bits than those that are saved
        grain = piece if firm_slots is None else 1
        self._group = (self._salt, grain)
        self._marks = tuple(mark // grain * grain for mark in self._marks)
        last = (len(tokens) - 1) // piece * piece  # where the last piece begins
        most = last if firm_slots is None else max(last, len(tokens) - firm_slots)
        found = self._store.match(self._group, tokens[:most], self._marks)
        if found is not None:
            saved, length = found
            if firm_slots is None:
                length -= length % piece
            elif length < last:  # the step to the piece's end must be firm
                length -= max(0, firm_slots - (piece - length % piece))
            with suppress(Exception):  # memory, most likely: the row reads all of its prompt, and says so
                own = min(len(tokens) + SPARE, capacity)
                is_wide = saved.length > max(own, cache.capacity)
                if (
                    is_wide
                    and most_entries is not None
                    and bucket(saved.length, cache.capacity) > most_entries
                ):
                    length = 0
                if length > 0:
                    cache.reserve(max(saved.length, own))
                    cache.load(place, saved.data, length)
                    self.firm = length
        self._store.count(len(tokens), self.firm)
        return self.firm

    def saw(self, before: int, cursor: int, slots: int, *, is_piece: bool) -> None:
        """A step of `slots` slots moved the row's cursor; `is_piece`: it read a whole piece of a prompt."""
        firm_slots = self._store.firm_slots
        if before == self.firm and (is_piece if firm_slots is None else slots >= firm_slots):
            self.firm = cursor

    def keep(self, cache: Cache, place: int, tokens: Sequence[int]) -> None:
        """Give the store the row's firm entries, and the beginnings that are marked by themselves."""
        if self._group is None:
            return
        for length, fixed in [*((mark, True) for mark in self._marks), (self.firm, False)]:
            if 0 < length <= self.firm:
                num_bytes = length * cache.entry_bytes
                copy = partial(_copy, cache, place, length)
                self._store.save(self._group, tokens[:length], num_bytes, copy, fixed=fixed)


def _copy(cache: Cache, place: int, length: int) -> Saved:
    return Saved(cache.save(place, length), length)


def _key(ids: Sequence[int]) -> bytes:
    """Four bytes for each id, the highest first: keys are sorted as their ids are."""
    packed = array(FOUR_BYTES, ids)
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _nearest(keys: list[bytes], key: bytes) -> tuple[int, bytes]:
    """Of the sorted `keys` the one that has most of `key`'s beginning, and how many ids that is."""
    at = bisect_left(keys, key)
    return max(((_common(other, key), other) for other in keys[max(0, at - 1) : at + 1]), default=(0, b""))


def _begins_one(keys: list[bytes], key: bytes) -> bool:
    """Whether one of the sorted `keys` begins with `key`, or is it."""
    at = bisect_left(keys, key)
    return at < len(keys) and keys[at].startswith(key)


def _common(one: bytes, other: bytes) -> int:
    """How many ids two keys have in common at their beginning."""
    if one[:4] != other[:4]:  # the usual end of a search that finds nothing
        return 0
    size = min(len(one), len(other))
    a, b = (np.frombuffer(key, np.uint32, size // 4) for key in (one, other))
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else size // 4
