"""A context in which an error ends some rows, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from .row import Accepted, Row


class ErrorsEnd:
    """A context that ends `rows`, and no others, if its body raises; adds their last events to `events`.

    It catches BaseException, because a panic of a Rust library is not an Exception.
    """

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
