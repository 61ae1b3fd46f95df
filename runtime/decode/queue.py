"""The queue of waiting rows: clients take turns, and the rows of each client keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from .row import Row


class Queue:
    """Iterates over rows in the order in which they would start: the first row of each client, then the
    second of each, and so on. After a row has started, its client comes last.

    So a client that sends a hundred requests at once delays only itself. Rows without a client count as rows
    of one client.
    """

    def __init__(self) -> None:
        self._rows: dict[Hashable, deque[Row]] = {}  # clients in the order of their turns

    def __len__(self) -> int:
        return sum(len(rows) for rows in tuple(self._rows.values()))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """Lazy, because usually the first rows are enough."""
        clients = [iter(rows) for rows in self._rows.values()]
        while clients:
            remaining = []
            for rows in clients:
                if (row := next(rows, None)) is not None:
                    yield row
                    remaining.append(rows)
            clients = remaining

    def add(self, row: Row) -> None:
        """Add a row after the others of its client."""
        self._rows.setdefault(row.client, deque()).append(row)

    def remove(self, row: Row) -> None:
        """Remove a row that starts; its client's turn is over."""
        rows = self._rows.pop(row.client)
        rows.remove(row)
        if rows:
            self._rows[row.client] = rows

    def drop_finished(self) -> None:
        """Remove rows that ended while they waited. The turns of clients do not change."""
        for client, rows in list(self._rows.items()):
            if any(row.finish_reason is not None for row in rows):
                self._rows[client] = deque(row for row in rows if row.finish_reason is None)
                if not self._rows[client]:
                    del self._rows[client]
