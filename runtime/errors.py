"""The closed family of errors. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class MarsError(Exception):
    """Anything that a user of mars-export can put right.

    The command line prints it as one block and exits with 1.
    """


class CheckpointError(MarsError):
    """The checkpoint cannot be read, or is not a MARS checkpoint we can export."""


class ExportError(MarsError):
    """The checkpoint is fine but the bundle cannot be written or does not agree with it."""


class BundleError(MarsError):
    """The bundle is damaged, unsafe, or of a format this version does not read."""


class SessionError(MarsError):
    """The bundle is fine but cannot run here, or the request cannot be served."""


class CalibrationError(MarsError):
    """The task or its answers do not allow the wanted calibration."""


def listed(problems: Sequence[str], most: int = 20) -> str:
    """Problems as the end of a message: each on a line of its own, and how many more there are
    than `most`.
    """
    shown = [*problems[:most], *([f"and {len(problems) - most} more"] if len(problems) > most else [])]
    return "".join(f"\n  {problem}" for problem in shown)
