"""The state of a run: a JSON line for each finished piece, so that an interrupted run can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runtime.errors import CalibrationError

VERSION = 2


class Journal:
    """JSON values by key in a file that only grows. A last line that a crash cut short is dropped."""

    def __init__(self, path: Path, values: dict[str, Any], end: int) -> None:
        self.path, self._values = path, values
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(end)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], *, resume: bool, force: bool) -> Journal:
        """Open the state at `path` for the work that `identity` names.

        An existing state is used with `resume` and discarded with `force`. Raises CalibrationError for one
        without either, or if it is of other work, with what differs.
        """
        head = {"version": VERSION, **identity}
        old, values, end = ({}, {}, 0) if force or not path.exists() else _read(path)
        if not old:  # a new state, or one without a complete first line
            journal = cls(path, {}, 0)
            journal._write(head)
            return journal
        if old != head:
            names = ", ".join(sorted(k for k in head.keys() | old.keys() if head.get(k) != old.get(k)))
            raise CalibrationError(
                f"{path}: this is the state of a run with another {names}; --force discards it, --output"
                " chooses another folder"
            )
        if values and not resume:
            raise CalibrationError(
                f"{path}: an earlier run left {len(values)} results here; --resume continues it, --force"
                " discards them"
            )
        return cls(path, values, end)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._write([key, value])

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Any) -> None:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        self._file.write(text.encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()  # it survives the end of this process, but not always a power failure


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(head, values, end of the last complete line)."""
    head: dict[str, Any] = {}
    values: dict[str, Any] = {}
    end = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw.decode("utf-8", "surrogatepass"))
                if number == 1:
                    head = dict(line)
                else:
                    key, value = line
                    values[key] = value
            except (ValueError, TypeError) as error:
                raise CalibrationError(
                    f"{path}: line {number} is damaged ({error}); --force starts over"
                ) from error
            end += len(raw)
    return head, values, end
