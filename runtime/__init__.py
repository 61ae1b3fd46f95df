"""bundle -> tokens. numpy and one backend; never torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mars_export.runtime.errors import BundleError, CalibrationError, CheckpointError, ExportError, MarsError, SessionError

if TYPE_CHECKING:
    from mars_export.runtime.config import GenerationConfig
    from mars_export.runtime.engine import Engine, Request
    from mars_export.runtime.schedule import Limits
    from mars_export.runtime.session import Commit, Completion, Event, Session, Stream
    from mars_export.runtime.stats import Stats

# Imported on first use, so that the command line answers --help without numpy and the tokenizer.
_LAZY = {
    "GenerationConfig": "config",
    "Engine": "engine",
    "Limits": "schedule",
    "Request": "engine",
    "Commit": "session",
    "Completion": "session",
    "Event": "session",
    "Session": "session",
    "Stream": "session",
    "Stats": "stats",
}

__all__ = [
    "BundleError",
    "CalibrationError",
    "CheckpointError",
    "Commit",
    "Completion",
    "Engine",
    "Event",
    "ExportError",
    "GenerationConfig",
    "Limits",
    "MarsError",
    "Request",
    "Session",
    "SessionError",
    "Stats",
    "Stream",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
