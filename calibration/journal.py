"""The state of a run: a JSON line for each finished piece, so that an interrupted run can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..runtime.errors import CalibrationError

VERSION = 1
T = TypeVar("T")


class Journal:
    """Values by key in a file that only grows. A last line that a crash cut short is dropped on opening."""

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
        if force or not path.exists() or path.stat().st_size == 0:
            path.unlink(missing_ok=True)
            journal = cls(path, {}, 0)
            journal._write(head)
            return journal
        old, values, end = _read(path)
        if not old:  # not even its first line is complete
            return cls.open(path, identity, resume=resume, force=True)
        if old != head:
            names = ", ".join(sorted(k for k in head.keys() | old.keys() if head.get(k) != old.get(k)))
            raise CalibrationError(
                f"{path}: this is the state of other work (another {names}); --force discards it, --output"
                " chooses another folder"
            )
        if values and not resume:
            raise CalibrationError(
                f"{path}: it holds {len(values)} finished pieces of this work; --resume uses them, --force"
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

    def read(self, key: str, kind: type[T]) -> T:
        """The value of `key`, as the dataclass it was before it was written."""
        value = self._values[key]
        return value if isinstance(value, kind) else restore(kind, value)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Any) -> None:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_plain)
        self._file.write(text.encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()  # it survives the end of this process, but not always a power failure


def restore(kind: Any, value: Any) -> Any:
    """A JSON value as an annotation's type: dataclasses, tuples, dicts of them, None; others unchanged."""
    if value is None:
        return None
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: restore(hints[name], part) for name, part in value.items()})
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not NoneType]
    if origin in (Union, UnionType):
        return restore(parts[0], value) if len(parts) == 1 else value
    if origin is dict:
        return {key: restore(parts[1], part) for key, part in value.items()}
    if origin is not tuple:
        return value
    if parts[-1] is not Ellipsis:
        return tuple(restore(part, one) for part, one in zip(parts, value, strict=True))
    is_simple = not get_origin(parts[0]) and not is_dataclass(parts[0])
    return tuple(value) if is_simple else tuple(restore(parts[0], one) for one in value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _plain(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(head, values, end of the last complete line)."""
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
                    f"{path}: line {number} is damaged ({error}); --force starts over"
                ) from error
            if line is None:
                break
            end += len(raw)
    return head, values, end
