"""Values by module name or by a regular expression for one, as PEFT reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patterns(Generic[T]):
    """`values` by pattern; the first that matches a module's whole name, or its end after a dot, counts.
    Raises ValueError for what is no regular expression.
    """

    values: Mapping[str, T]

    def __post_init__(self) -> None:
        for pattern in self.values:
            try:
                re.compile(pattern)
            except (re.error, RecursionError) as error:
                raise ValueError(
                    f"the pattern {pattern[:80]!r} is no regular expression ({error})"
                ) from error

    def find(self, module: str, default: T) -> T:
        matches = (v for p, v in self.values.items() if re.fullmatch(rf"(.*\.)?({p})", module))
        return next(matches, default)
