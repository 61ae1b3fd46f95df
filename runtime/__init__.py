"""bundle -> tokens. numpy and one backend; never torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    BundleError,
    CalibrationError,
    CheckpointError,
    ExportError,
    MarsError,
    Overloaded,
    SessionError,
)

if TYPE_CHECKING:
    from .answer import Completion, Event, Stream
    from .batcher import Batcher, Engine
    from .conversation import Conversation
    from .counts import Counts
    from .decode.config import GenerationConfig
    from .decode.schedule import Limits
    from .decode.stats import Stats
    from .request import Request
    from .session import Commit, Session

# Imported on first use, so that the command line answers --help without numpy and the tokenizer.
_LAZY = {
    "GenerationConfig": "decode.config",
    "Batcher": "batcher",
    "Engine": "batcher",
    "Limits": "decode.schedule",
    "Counts": "counts",
    "Request": "request",
    "Commit": "session",
    "Completion": "answer",
    "Conversation": "conversation",
    "Event": "answer",
    "Session": "session",
    "Stream": "answer",
    "Stats": "decode.stats",
}

__all__ = [
    "Batcher",
    "BundleError",
    "CalibrationError",
    "CheckpointError",
    "Commit",
    "Completion",
    "Conversation",
    "Counts",
    "Engine",
    "Event",
    "ExportError",
    "GenerationConfig",
    "Limits",
    "MarsError",
    "Overloaded",
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
