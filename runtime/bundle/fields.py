"""Typed reading of untrusted JSON objects: every wrong field is noted, so that all of them can be reported at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

LARGEST = sys.float_info.max


class Fields:
    """One JSON object at `where`, such as `manifest.json: model`. Getters return a harmless value after noting a problem."""

    def __init__(self, value: Any, where: str, problems: list[str]) -> None:
        self.where, self.problems = where, problems
        self.value: Mapping[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self.wrong("", f"an object is expected, not {_kind(value)}")

    def wrong(self, name: str, what: str) -> None:
        self.problems.append(f"{self.where}{'.' if name else ''}{name}: {what}")

    def integer(self, name: str, low: int = 0, high: int = 2**53) -> int:
        value = self.value.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.wrong(name, f"an integer of {low} to {high} is expected, not {_kind(value)}")
            return low
        return value

    def optional_integer(self, name: str, low: int = 0) -> int | None:
        return None if self.value.get(name) is None else self.integer(name, low)

    def number(self, name: str) -> float:
        value = self.value.get(name)
        # Compared, not converted: an integer may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
            self.wrong(name, f"a finite number is expected, not {_kind(value)}")
            return 0.0
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.value.get(name)
        if not isinstance(value, bool):
            self.wrong(name, f"true or false is expected, not {_kind(value)}")
        return value is True

    def text(self, name: str, choices: tuple[str, ...] = ()) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not value:
            self.wrong(name, f"a non-empty string is expected, not {_kind(value)}")
            return choices[0] if choices else "?"
        if choices and value not in choices:
            self.wrong(name, f"`{value[:60]}` is not one of {', '.join(choices)}")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.value.get(name) is None else self.text(name)

    def items(self, name: str) -> list[Any]:
        value = self.value.get(name)
        if not isinstance(value, list):
            self.wrong(name, f"a list is expected, not {_kind(value)}")
            return []
        return value

    def integers(self, name: str, high: int) -> tuple[int, ...]:
        values = self.items(name)
        good = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= high]
        if len(good) != len(values):
            self.wrong(name, f"integers of 0 to {high} are expected")
        return tuple(good)

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.items(name)
        good = [v for v in values if isinstance(v, str)]
        if len(good) != len(values):
            self.wrong(name, "strings are expected")
        return tuple(good)

    def named_texts(self, name: str) -> dict[str, str]:
        """An object whose values are strings, empty ones included."""
        values = self.object(name)
        for key, value in values.value.items():
            if not isinstance(value, str):
                values.wrong(key, f"a string is expected, not {_kind(value)}")
        return {key: value for key, value in values.value.items() if isinstance(value, str)}

    def object(self, name: str) -> Fields:
        return Fields(self.value.get(name), f"{self.where}.{name}", self.problems)

    def objects(self, name: str) -> list[Fields]:
        return [Fields(v, f"{self.where}.{name}[{i}]", self.problems) for i, v in enumerate(self.items(name))]


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
