"""Rows that wait for a place: clients take turns, and the rows of each come in their order. Runs nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from .row import Row


class Queue:
    """Iterated over, rows come as they would get their places: the first of each client, then the second of
    each, and so on. A client whose row got a place is the last of all clients then.

    So whoever sends a hundred requests at once waits for them, and nobody else does. Rows of nobody are those
    of one client.
    """

    def __init__(self) -> None:
        self._rows: dict[Hashable, deque[Row]] = {}  # clients in the order of their turns

    def __len__(self) -> int:
        return sum(len(rows) for rows in tuple(self._rows.values()))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """Costs no more than what is asked for: usually the first rows will do."""
        rounds = [iter(rows) for rows in self._rows.values()]
        while rounds:
            left = []
            for rows in rounds:
                if (row := next(rows, None)) is not None:
                    yield row
                    left.append(rows)
            rounds = left

    def add(self, row: Row) -> None:
        """The last of its client."""
        self._rows.setdefault(row.client, deque()).append(row)

    def take(self, row: Row) -> None:
        """The row gets its place; its client's turn is over."""
        rows = self._rows.pop(row.client)
        rows.remove(row)
        if rows:
            self._rows[row.client] = rows

    def drop_finished(self) -> None:
        """Rows that were ended while they waited go; nobody's turn changes."""
        for client, rows in list(self._rows.items()):
            if any(row.finish_reason is not None for row in rows):
                self._rows[client] = deque(row for row in rows if row.finish_reason is None)
                if not self._rows[client]:
                    del self._rows[client]
