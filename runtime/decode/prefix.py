"""The prefix cache: KV entries of earlier prompts and answers, by their token ids."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from sys import byteorder
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .backend import bucket

if TYPE_CHECKING:
    from .backend import Cache

FOUR_BYTES = "I"  # the type code of 32-bit numbers wherever C's int has four bytes
SPARE = 64  # entries that are reserved after a prompt, for the first steps
# With recurrent states. The next prompt of a chat may differ from TAIL tokens before the end on, where the
# template began the answer. A copy of the states takes as long as reading a few tokens.
TAIL, LEAST = 8, 32

Group = tuple[str, int]
"""Sequences that may share entries: the salt, and the size of chunks if entries depend on it (else 1)."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A cache's copy of its first `length` entries."""

    data: Any
    length: int


@dataclass(slots=True)
class PrefixEntry:
    """KV entries of exactly the ids of `key`. A `fixed` one stays when a longer one begins with it."""

    group: Group
    key: bytes
    saved: Saved
    num_bytes: int
    fixed: bool


class Copies(Protocol):
    """Copies of entries that outlive the process. Its methods return at once."""

    def used(self, entry: PrefixEntry) -> None:
        """Note that an entry was added or used."""

    def dropped(self, entry: PrefixEntry, *, replaced: bool) -> None:
        """Note that an entry was dropped; `replaced`: a longer one begins with it."""


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts of a prefix cache since it was created.

    queries: prompts that were looked up.
    hits: prompts with a stored beginning.
    query_tokens: tokens of all these prompts.
    hit_tokens: tokens of them that were found.
    saved: entries that were added.
    evicted: entries that were dropped because memory was short.
    failed: entries that could not be copied.
    entries: entries now.
    num_bytes: size of these.
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


class PrefixCache:
    """Entries of at most `budget` bytes; the least recently used are evicted first. Thread-safe.

    `reproducible_slots`: the backend's. `is_recurrent`: entries have recurrent states, so only all of an
    entry is used. An entry that is evicted while it is copied lives until the copy is done. `copies`, if
    set, receives all entries.
    """

    copies: Copies | None = None

    def __init__(
        self, budget: int, reproducible_slots: int | None = None, *, is_recurrent: bool = False
    ) -> None:
        self.budget, self.reproducible_slots = budget, reproducible_slots
        self.is_recurrent = is_recurrent
        self._lock = threading.Lock()
        self._entries = OrderedDict[tuple[Group, bytes], PrefixEntry]()  # the last is the latest used
        self._sorted: dict[Group, list[bytes]] = {}  # keys with a common beginning are neighbours
        self._num_bytes = 0  # of the entries, including unfinished copies
        self._counts: Counter[str] = Counter()

    @property
    def stats(self) -> PrefixStats:
        with self._lock:
            return PrefixStats(**self._counts, entries=len(self._entries), num_bytes=self._num_bytes)

    @property
    def entries(self) -> list[PrefixEntry]:
        """All entries, the least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def handle(self, salt: str = "", marks: Sequence[int] = ()) -> PrefixHandle | None:
        """A sequence's connection to this cache; None if the budget is 0.

        `marks`: lengths of the prompt's beginnings that other prompts may share.
        """
        return PrefixHandle(self, salt, marks) if self.budget > 0 else None

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            for name in list(self._entries):
                self._drop(name)

    def count(self, query_tokens: int, hit_tokens: int) -> None:
        """Count one prompt that was looked up."""
        with self._lock:
            self._counts.update(
                queries=1, hits=int(hit_tokens > 0), query_tokens=query_tokens, hit_tokens=hit_tokens
            )

    def match(self, group: Group, ids: Sequence[int], marks: Sequence[int] = ()) -> tuple[Saved, int] | None:
        """The entry with the longest common beginning with `ids`, and the length of that; None for no entry.

        Entries of the lengths `marks` count as used, too.
        """
        key = _key(ids)
        with self._lock:
            find = _longest if self.is_recurrent else _nearest
            length, best = find(self._sorted.get(group, []), key)
            if not length:
                return None
            if (group, key[: 4 * length]) in self._entries:
                best = key[: 4 * length]  # the shortest that is enough: a longer one may be evicted
            saved = self._use((group, best)).saved
            for mark in marks:  # later than `best`, so that the part which others share stays the longest
                if (group, key[: 4 * mark]) in self._entries:
                    self._use((group, key[: 4 * mark]))
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
        """Add the entry that `copy` makes, unless it is there or does not fit. A failed copy is counted."""
        key = _key(ids)
        with self._lock:
            if not key or num_bytes > self.budget or self._covers(group, key, fixed):
                return
            self._drop_beginning(group, key)
            while self._entries and self._num_bytes + num_bytes > self.budget:
                self._drop(next(iter(self._entries)))
                self._counts["evicted"] += 1
            if self._num_bytes + num_bytes > self.budget:
                return  # entries that are being copied take the rest
            self._num_bytes += num_bytes
        saved = None
        try:
            with suppress(Exception):  # most likely a lack of memory; the answer does not depend on the copy
                saved = copy()
        finally:
            with self._lock:
                self._num_bytes -= num_bytes
                if saved is None:
                    self._counts["failed"] += 1
                elif not self._covers(group, key, fixed):  # another sequence may have been faster
                    self._drop_beginning(group, key)
                    self._add(PrefixEntry(group, key, saved, num_bytes, fixed))

    # --- the caller holds the lock ---

    def _covers(self, group: Group, key: bytes, fixed: bool) -> bool:
        """Whether an entry has all ids of `key`, and no others if it should be `fixed` or has states. Marks
        it as used.
        """
        keys, is_exact = self._sorted.get(group, []), fixed or self.is_recurrent
        i = bisect_left(keys, key)
        if i == len(keys) or not (keys[i] == key if is_exact else keys[i].startswith(key)):
            return False
        self._use((group, keys[i])).fixed |= fixed
        return True

    def _use(self, name: tuple[Group, bytes]) -> PrefixEntry:
        """The entry, which becomes the latest used."""
        self._entries.move_to_end(name)
        entry = self._entries[name]
        if self.copies is not None:
            self.copies.used(entry)
        return entry

    def _add(self, entry: PrefixEntry) -> None:
        keys = self._sorted.setdefault(entry.group, [])
        keys.insert(bisect_left(keys, entry.key), entry.key)
        self._entries[entry.group, entry.key] = entry
        self._num_bytes += entry.num_bytes
        self._counts["saved"] += 1
        self._use((entry.group, entry.key))

    def _drop_beginning(self, group: Group, key: bytes) -> None:
        """Drop the longest entry that `key` begins with, unless it is fixed."""
        keys = self._sorted.get(group, [])
        i = bisect_left(keys, key) - 1  # keys in between would begin with it, too
        if i >= 0 and key.startswith(keys[i]) and not self._entries[group, keys[i]].fixed:
            self._drop((group, keys[i]), replaced=True)

    def _drop(self, name: tuple[Group, bytes], *, replaced: bool = False) -> None:
        entry = self._entries.pop(name)
        if self.copies is not None:
            self.copies.dropped(entry, replaced=replaced)
        self._num_bytes -= entry.num_bytes
        keys = self._sorted[entry.group]
        keys.pop(bisect_left(keys, entry.key))
        if not keys:
            del self._sorted[entry.group]


class PrefixHandle:
    """One sequence's connection to the prefix cache. Used by the thread that runs the sequence."""

    def __init__(self, prefixes: PrefixCache, salt: str, marks: Sequence[int]) -> None:
        self._prefixes, self._salt, self._marks = prefixes, salt, tuple(marks)
        self._group: Group | None = None  # until the sequence begins
        # With recurrent states: where they are copied, and the tokens of the last copy, loaded or made.
        self._stops: tuple[int, ...] = ()
        self._copied = 0

    def lookup(
        self,
        cache: Cache,
        place: int,
        tokens: Sequence[int],
        chunk: int,
        capacity: int,
        max_entries: int | None = None,
        lengths: Sequence[int] = (),
    ) -> int:
        """Load the longest saved beginning of `tokens`, and return its length. The last tokens are never
        loaded, because a step must feed something.

        The rest takes the same steps, or reproducible ones, as a sequence that reads `tokens` from 0 in
        chunks. An entry is not loaded if sequences of its length would exceed `max_entries`. `lengths`: of
        the rows, as in `Cache.reserve`.
        """
        reproducible_slots = self._prefixes.reproducible_slots
        if reproducible_slots is not None and chunk < reproducible_slots:
            return 0  # the sequence's chunks give other bits than the saved entries have
        block_size = chunk if reproducible_slots is None else 1
        self._group = (self._salt, block_size)
        last = (len(tokens) - 1) // chunk * chunk  # where the last chunk begins
        limit = last if reproducible_slots is None else max(last, len(tokens) - reproducible_slots)
        if self._prefixes.is_recurrent:
            ends = (min(mark, limit) for mark in (*self._marks, len(tokens) - TAIL))
            self._marks = tuple(_usable(end, last, chunk, reproducible_slots) for end in ends)
            self._stops = self._marks
        else:
            self._marks = tuple(mark // block_size * block_size for mark in self._marks)
        match, num_loaded = self._prefixes.match(self._group, tokens[:limit], self._marks), 0
        if match is not None:
            saved, num_common = match
            length = _usable(num_common, last, chunk, reproducible_slots)
            room = min(len(tokens) + SPARE, capacity)
            if self._prefixes.is_recurrent and length < saved.length:
                length = 0
            if length > 0 and _may_widen(cache, saved.length, room, max_entries):
                # most likely a lack of memory: the sequence reads all of its prompt
                with suppress(Exception):
                    cache.reserve(max(saved.length, room), lengths)
                    cache.load(place, saved.data, length)
                    num_loaded = self._copied = length
        self._prefixes.count(len(tokens), num_loaded)
        return num_loaded

    def stop(self, cursor: int) -> int | None:
        """Where the chunk of the prompt that begins at `cursor` must end at the latest, because the states
        there are to be copied by `store`.
        """
        least = cursor + (self._prefixes.reproducible_slots or 1)
        return min((at for at in self._stops if self._is_worth(at) and at >= least), default=None)

    def _is_worth(self, length: int) -> bool:
        return not self._prefixes.is_recurrent or length >= self._copied + LEAST

    def store(self, cache: Cache, place: int, tokens: Sequence[int], num_reproducible: int) -> None:
        """Save the sequence's reproducible entries, and the marked beginnings by themselves. Recurrent states
        are saved where the row's now are.
        """
        if self._group is None:
            return
        for length, fixed in [*((mark, True) for mark in self._marks), (num_reproducible, False)]:
            if 0 < length <= num_reproducible and self._is_worth(length):
                if (num_bytes := cache.copy_bytes(place, length)) is None:
                    continue
                copy = partial(_copy, cache, place, length)
                self._prefixes.save(self._group, tokens[:length], num_bytes, copy, fixed=fixed)
                self._copied = length


def _usable(num_common: int, last: int, chunk: int, reproducible_slots: int | None) -> int:
    """How many of `num_common` saved entries a sequence can begin with, whose last chunk begins at `last`:
    the steps that it then takes must give the bits that reading all chunks gives.
    """
    if reproducible_slots is None:
        return num_common - num_common % chunk  # only whole chunks give equal bits
    if num_common >= last:
        return num_common  # the next step also ends the prompt, and has at least `reproducible_slots` slots
    # the rest of the chunk is reproducible
    return num_common - max(0, reproducible_slots - (chunk - num_common % chunk))


def _may_widen(cache: Cache, length: int, room: int, max_entries: int | None) -> bool:
    """Whether the sequences may hold a saved copy of `length` entries: they have, or will have, that many
    anyway, or stay within `max_entries`.
    """
    if max_entries is None or length <= max(room, cache.capacity):
        return True
    return bucket(length, cache.capacity) <= max_entries


def _copy(cache: Cache, place: int, length: int) -> Saved:
    return Saved(cache.save(place, length), length)


def _key(ids: Sequence[int]) -> bytes:
    """Four bytes for each id, the highest first, so that keys are sorted like their ids."""
    packed = array(FOUR_BYTES, ids)
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _nearest(keys: list[bytes], key: bytes) -> tuple[int, bytes]:
    """The most ids that one of the sorted `keys` has in common with the beginning of `key`, and that one."""
    i = bisect_left(keys, key)
    return max(((_common(other, key), other) for other in keys[max(0, i - 1) : i + 1]), default=(0, b""))


def _longest(keys: list[bytes], key: bytes) -> tuple[int, bytes]:
    """The longest of the sorted `keys` that `key` begins with, and its ids."""
    while i := bisect_right(keys, key):
        num_common = _common(keys[i - 1], key)
        if 4 * num_common == len(keys[i - 1]):
            return num_common, keys[i - 1]
        key = key[: 4 * num_common]
    return 0, b""


def _common(one: bytes, other: bytes) -> int:
    """The number of leading ids that two keys share."""
    if one[:4] != other[:4]:  # the usual end of a search that finds nothing
        return 0
    size = min(len(one), len(other))
    a, b = (np.frombuffer(key, np.uint32, size // 4) for key in (one, other))
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else size // 4
