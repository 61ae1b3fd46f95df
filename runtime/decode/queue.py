"""The queue of waiting sequences: clients take turns, and the sequences of each client keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from .sequence import Sequence


class Queue:
    """Iterates over sequences in the order in which they would start: the first sequence of each client, then
    the second of each, and so on. After a sequence has started, its client comes last.

    So a client that sends a hundred requests at once delays only itself. Sequences without a client count as
    sequences of one client.
    """

    def __init__(self) -> None:
        self._seqs: dict[Hashable, deque[Sequence]] = {}  # clients in the order of their turns

    def __len__(self) -> int:
        return sum(len(seqs) for seqs in tuple(self._seqs.values()))

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        """Lazy, because usually the first sequences are enough."""
        clients = [iter(seqs) for seqs in self._seqs.values()]
        while clients:
            remaining = []
            for seqs in clients:
                if (seq := next(seqs, None)) is not None:
                    yield seq
                    remaining.append(seqs)
            clients = remaining

    def add(self, seq: Sequence) -> None:
        """Add a sequence after the others of its client."""
        self._seqs.setdefault(seq.client, deque()).append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that starts; its client's turn is over."""
        seqs = self._seqs.pop(seq.client)
        seqs.remove(seq)
        if seqs:
            self._seqs[seq.client] = seqs

    def drop_finished(self) -> None:
        """Remove sequences that ended while they waited. The turns of clients do not change."""
        for client, seqs in list(self._seqs.items()):
            for seq in seqs:
                seq.refresh()
            if any(seq.finish_reason is not None for seq in seqs):
                self._seqs[client] = deque(seq for seq in seqs if seq.finish_reason is None)
                if not self._seqs[client]:
                    del self._seqs[client]
