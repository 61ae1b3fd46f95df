"""The device that a session is opened on, by its name: `cpu`, `cuda`, or `cuda:1` for another GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SessionError

DEVICES = ("cpu", "cuda")
MAX_DIGITS = 4  # of a number


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device; `number` is the part after the colon, or None. As text it is `cuda` or, for another GPU than
    the first, `cuda:1`.
    """

    kind: str
    number: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Raises SessionError for an unknown device, an invalid number, and a number of the CPU."""
        kind, colon, number = text.partition(":")
        if kind not in DEVICES:
            what = f"unknown device `{text[:60]}` (known: {', '.join(DEVICES)})"
            raise SessionError(what, field="device")
        if not colon:
            return cls(kind)
        if not (number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS):
            raise SessionError(
                f"device `{text[:60]}`: the part after the colon must be a GPU number, counted from"
                " 0, as in cuda:1",
                field="device",
            )
        if kind == "cpu":
            raise SessionError(f"device `{text[:60]}`: the CPU has no number; give cpu", field="device")
        return cls(kind, int(number))

    @property
    def ordinal(self) -> int:
        """The number, by default 0."""
        return self.number or 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.ordinal else self.kind


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How a session uses a GPU.

    `stream`: a cudaStream_t of the caller's; None for a stream of its own with CUDA's `priority`. `strict`
    refuses a graph that is partly computed on the CPU.
    """

    stream: int | None = None
    priority: int = 0
    strict: bool = False
