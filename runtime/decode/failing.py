"""What goes wrong inside a step, as events of the rows that it concerns."""

from __future__ import annotations

from collections.abc import Sequence

from .row import Accepted, Row


class Failing:
    """What goes wrong inside ends `rows`, and no others: `events` tell. A library's panic is no Exception."""

    __slots__ = ("events", "rows")

    def __init__(self, rows: Sequence[Row], events: list[Accepted]) -> None:
        self.rows, self.events = rows, events

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
            return False
        self.events += [row.fail(error) for row in self.rows]
        return True
