"""The state file of a calibration: one JSON line per finished piece of work, so that an interrupted run goes on. Knows no statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runtime.errors import CalibrationError

VERSION = 1


class Journal:
    """Values by key, kept in a file that only ever grows. A last line that a crash cut short is dropped when it is opened again."""

    def __init__(self, path: Path, values: dict[str, Any], end: int) -> None:
        self.path, self._values = path, values
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(end)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], *, resume: bool, force: bool) -> Journal:
        """Open the state at `path` for work on what `identity` names.

        A state that is there is used with `resume`, thrown away with `force`, and refused otherwise. Raises CalibrationError,
        also for a state of other work, with what differs.
        """
        head = {"version": VERSION, **identity}
        if path.is_dir():
            raise CalibrationError(f"{path}: a directory is where the state file should be")
        if force or not path.exists() or path.stat().st_size == 0:
            path.unlink(missing_ok=True)
            journal = cls(path, {}, 0)
            journal._write(head)
            return journal
        found, values, end = _read(path)
        if not found:
            return cls.open(
                path, identity, resume=resume, force=True
            )  # cut short before its first line was whole
        if found != head:
            odd = ", ".join(sorted(k for k in head.keys() | found.keys() if head.get(k) != found.get(k)))
            raise CalibrationError(
                f"{path}: a state of other work is there (another {odd}); --force throws it away, --output puts this elsewhere"
            )
        if values and not resume:
            raise CalibrationError(
                f"{path}: {len(values)} finished pieces of this work are there; --resume uses them, --force throws them away"
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
        self._file.write(
            json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
            + b"\n"
        )
        self._file.flush()  # survives the end of this process; a loss of power may cost some work


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(head, values, end of the last whole line)."""
    head: dict[str, Any] = {}
    values: dict[str, Any] = {}
    end = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json.loads(raw.decode("utf-8", "surrogatepass")) if raw.endswith(b"\n") else None
                if number == 1:
                    head = dict(line or {})
                elif line is not None:
                    key, value = line
                    values[key] = value
            except (ValueError, TypeError) as error:
                raise CalibrationError(
                    f"{path}: line {number} is damaged ({error}); --force starts anew"
                ) from error
            if line is None:
                break
            end += len(raw)
    return head, values, end
