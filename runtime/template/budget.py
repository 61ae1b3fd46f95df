"""What a rendering costs, paid before it is computed: characters and list entries that come into being, and
steps of loops.

Prices of operators and methods of plain values. Knows jinja2's words for values, and no filter.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

WORK, WORK_PER_CHARACTER, MOST_WORK, SECONDS = 20_000_000, 64, 400_000_000, 4.0
ENTRY = 8  # what a list entry or a step of a loop costs, in characters
DEEPEST, WIDEST, LONGEST_POWER = 100, 10_000, 4096
PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


class TooMuch(TemplateError):
    """The template asks for more than its budget."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still do."""

    left: int
    end: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def spend(self, work: int) -> None:
        self.left -= work + 1
        if self.left < 0 or time.monotonic() > self.end:
            raise TooMuch("it makes more text or takes more steps than these messages can need")

    def spend_on(self, value: Any, share: int = 1, depth: int = 0) -> None:
        """Pay for all that a value holds; for strings a part of their length where they are only
        referred to.
        """
        if isinstance(value, str):
            self.spend(len(value) // share)
        elif isinstance(value, int):
            self.spend(value.bit_length() // 3)
        elif isinstance(value, list | tuple | dict):
            if depth > DEEPEST:
                raise TooMuch(f"it nests values more than {DEEPEST} deep")
            self.spend(ENTRY * len(value))
            entries = chain.from_iterable(value.items()) if isinstance(value, dict) else value
            for entry in entries:
                self.spend_on(entry, share, depth + 1)
        elif isinstance(value, Namespace):
            raise SecurityError("a namespace is not text")
        else:
            self.spend(ENTRY)


current: ContextVar[Budget] = ContextVar("budget")
REFERRED = 16  # the share of a string's length that a reference to it costs


def counted(value: Any, step: int) -> Iterable[Any]:
    """What a loop goes through, each step paid for: at once where the number of steps is known."""
    if isinstance(value, Sized):
        current.get().spend((ENTRY + step) * len(value))
        return value  # type: ignore[return-value]
    return one_by_one(value, step)


def one_by_one(value: Iterable[Any], step: int) -> Iterator[Any]:
    for entry in value:
        current.get().spend(ENTRY + step)
        yield entry


def within(width: int) -> int:
    if not -WIDEST <= width <= WIDEST:
        raise TooMuch(f"a width is beyond {WIDEST}")
    return width


def pay_for_product(budget: Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int) and times > 0:
            before = budget.left
            budget.spend_on(value, 1 if isinstance(value, str) else REFERRED)
            budget.spend((before - budget.left) * (times - 1))
            return
        if isinstance(value, int) and value.bit_length() > LONGEST_POWER:
            raise TooMuch("a number is too large")
    budget.spend(1)


def pay_for_printf(budget: Budget, form: str, values: Any) -> None:
    pieces = PRINTF.findall(form)
    for size in chain.from_iterable(pieces):
        if size == "*" or len(size) > 4:
            raise TooMuch(f"a width is beyond {WIDEST}")
        budget.spend(int(size or 0))
    _pay_each_time(budget, values if isinstance(values, tuple | dict) else (values,), len(pieces), len(form))


def pay_for_format(budget: Budget, form: str, values: Any) -> None:
    count = 0
    for _, name, spec, _ in string.Formatter().parse(form):
        if name is None:
            continue
        count += 1
        if spec and ("{" in spec or any(len(size) > 4 for size in re.findall(r"\d+", spec))):
            raise TooMuch(f"a width is not plain, or beyond {WIDEST}")
        budget.spend(sum(int(size) for size in re.findall(r"\d+", spec or "")))
    _pay_each_time(budget, values, count, len(form))


def _pay_each_time(budget: Budget, values: Any, times: int, length: int) -> None:
    """As if every value came up every time: more than that it cannot be."""
    before = budget.left
    budget.spend_on(values)
    budget.spend((before - budget.left) * max(0, times - 1) + length)


def pay_for_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pay before a method of a plain value is called; returns its arguments."""
    if not isinstance(owner, str):
        budget.spend(ENTRY * len(owner) if isinstance(owner, Sized) else 1)
        if args and name in ("count", "index"):
            budget.spend_on(owner, REFERRED)
    elif name in ("split", "rsplit", "splitlines"):
        plain = name == "splitlines" or not args or not isinstance(args[0], str) or not args[0]
        budget.spend(len(owner) + ENTRY * (len(owner) if plain else owner.count(args[0]) + 1))
    elif name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        budget.spend(len(owner) + len(new) * (owner.count(old) if old else len(owner) + 1))
    elif name == "join" and args:
        parts = list(counted(args[0], 0))
        for part in parts:
            budget.spend_on(part)
        budget.spend(len(parts) * len(owner))
        return (parts,)
    elif name in ("center", "ljust", "rjust", "zfill") and args:
        budget.spend(len(owner) + abs(within(int(args[0]))))
    else:
        budget.spend(len(owner))
    return args
