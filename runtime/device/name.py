"""What a session is opened on, by its name: `cpu`, `cuda`, or a GPU by its number, `cuda:1`. Asks nobody."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SessionError

DEVICES = ("cpu", "cuda")
MOST_DIGITS = 4  # of a number


@dataclass(frozen=True, slots=True)
class DeviceName:
    """`number`: what was said behind the colon, None for nothing. As text: `cuda`, and `cuda:1` for another
    than the first.
    """

    kind: str
    number: int | None = None

    @classmethod
    def of(cls, text: str) -> DeviceName:
        """Raises SessionError for a device that nobody knows, a number that is none, and one of the CPU."""
        kind, colon, number = text.partition(":")
        if kind not in DEVICES:
            raise SessionError(f"unknown device `{text[:60]}` (known: {', '.join(DEVICES)})")
        if not colon:
            return cls(kind)
        if not (number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS):
            raise SessionError(
                f"device `{text[:60]}`: the part after the colon must be a GPU number, counted from"
                " 0, as in cuda:1"
            )
        if kind == "cpu":
            raise SessionError(f"device `{text[:60]}`: the CPU has no number; give cpu")
        return cls(kind, int(number))

    @property
    def ordinal(self) -> int:
        """The number, 0 where none was said."""
        return self.number or 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.ordinal else self.kind


@dataclass(frozen=True, slots=True)
class OnGpu:
    """How a GPU is used: on `stream`, a cudaStream_t of the caller's, or on one of its own with CUDA's
    `priority`; `strict` refuses a graph that is not computed there as a whole.
    """

    stream: int | None = None
    priority: int = 0
    strict: bool = False
