"""The closed family of errors. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class MarsError(Exception):
    """Anything that a user of mars-export can put right.

    The command line prints it as one block and exits with 1. `code` is one of those that docs/serving.md
    lists; `field` is the setting that is to blame, or "prompt", where one is.
    """

    code = "failed"
    field: str | None = None

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.field = code or self.code, field


class CheckpointError(MarsError):
    """The checkpoint cannot be read, or is not a MARS checkpoint we can export."""


class ExportError(MarsError):
    """The checkpoint is fine but the bundle cannot be written or does not agree with it."""


class PrecisionError(ExportError):
    """The checkpoint is fine, and a wider precision than this one can hold it."""


class BundleError(MarsError):
    """The bundle is damaged, unsafe, or of a format this version does not read."""


class SessionError(MarsError):
    """The bundle is fine but cannot run here, or the request cannot be served."""

    code = "invalid_value"


class DeviceLost(SessionError):
    """The device has failed for good: no request of this process will be answered on it any more. Start the
    process again.
    """

    code = "failed"


class Overloaded(SessionError):
    """Nothing is wrong with the request, there is no room for it now: too many wait, or too many of its
    client. `retry_after` seconds from now there may be (a guess from how long answers took).
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class CalibrationError(MarsError):
    """The task or its answers do not allow the wanted calibration."""


class MarsWarning(UserWarning):
    """Something that works, and not as well as it could. The command line prints it in one block, too."""


def listed(problems: Sequence[str], most: int = 20) -> str:
    """Problems as the end of a message: each on a line of its own, and how many more there are
    than `most`. What is long in one (a foreign file's name for something) is cut out.
    """
    short = [p if len(p) <= 1000 else f"{p[:700]}...{p[-200:]}" for p in problems[:most]]
    shown = [*short, *([f"and {len(problems) - most} more"] if len(problems) > most else [])]
    return "".join(f"\n  {problem}" for problem in shown)
