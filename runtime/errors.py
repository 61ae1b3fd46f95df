"""All errors that mars-export raises on purpose. Messages say what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class MarsError(Exception):
    """A problem that a user of mars-export can fix. The command line prints the message and exits.

    `code` is one of the codes that docs/serving.md lists; `field` is the wrong setting, "options" if it may
    be one of several, or "prompt".
    """

    code = "failed"
    field: str | None = None

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.field = code or self.code, field

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this error."""
        return 1 if self.field is None else 2


class CheckpointError(MarsError):
    """The checkpoint cannot be read, or is not a MARS checkpoint that can be exported."""


class ExportError(MarsError):
    """The bundle cannot be written, or does not agree with the checkpoint."""


class PrecisionError(ExportError):
    """The weights do not fit this precision; a wider one can hold them."""


class BundleError(MarsError):
    """The bundle is damaged, unsafe, or in a format that this version does not read."""


class SessionError(MarsError):
    """The bundle cannot run on this machine, or the request cannot be served."""

    code = "invalid_value"


class DeviceLost(SessionError):
    """The device failed, and this process cannot use it any more. Start the process again."""

    code = "failed"


class Overloaded(SessionError):
    """There is no room for the request now: too many requests wait, or too many of the same client.

    `retry_after`: seconds after which to try again, estimated from how long answers took.
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class CalibrationError(MarsError):
    """The task or its answers do not allow this calibration."""


class MarsWarning(UserWarning):
    """Something works, but not as well as it could. The command line prints it like an error."""


def listed(problems: Sequence[str], most: int = 20) -> str:
    """Problems as the end of a message, one per line: at most `most`, then the number of others."""
    lines = [p if len(p) <= 1000 else f"{p[:700]}...{p[-200:]}" for p in problems[:most]]
    if len(problems) > most:
        lines.append(f"and {len(problems) - most} more")
    return "".join(f"\n  {line}" for line in lines)


def brief(error: BaseException) -> str:
    """The message of an error, shortened, or its class."""
    return (str(error) or type(error).__name__)[:2000]


@contextmanager
def no_panic(kind: type[MarsError], what: str, remedy: str) -> Iterator[None]:
    """Turn errors of a Rust library into `kind`. Hostile input can cause panics, which are not Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MarsError):
        raise
    except BaseException as error:
        raise kind(f"{what} ({brief(error)}); {remedy}") from error
