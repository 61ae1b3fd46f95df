"""Export MARS multi-token language models and run them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .runtime.errors import (
    BundleError,
    CalibrationError,
    CheckpointError,
    ExportError,
    MarsError,
    Overloaded,
    SessionError,
)

if TYPE_CHECKING:
    from .runtime.batcher.admission_queue import Counts as Counts
    from .runtime.batcher.batcher import Batcher as Batcher
    from .runtime.batcher.request import Request as Request
    from .runtime.decode.config import GenerationConfig as GenerationConfig
    from .runtime.decode.event import Event as Event
    from .runtime.decode.limits import Limits as Limits
    from .runtime.decode.stats import Stats as Stats
    from .runtime.session.answer import Completion as Completion
    from .runtime.session.answer import Stream as Stream
    from .runtime.session.conversation import Conversation as Conversation
    from .runtime.session.session import Session as Session
    from .runtime.text.prompts import Chat as Chat

__version__ = "0.1.0"

# Imported on first use: `mars-export --help` needs neither numpy nor the tokenizer.
_LAZY = {
    "Batcher": "batcher.batcher",
    "Chat": "text.prompts",
    "Completion": "session.answer",
    "Conversation": "session.conversation",
    "Counts": "batcher.admission_queue",
    "Event": "decode.event",
    "GenerationConfig": "decode.config",
    "Limits": "decode.limits",
    "Request": "batcher.request",
    "Session": "session.session",
    "Stats": "decode.stats",
    "Stream": "session.answer",
}

__all__ = [
    "__version__",
    "Batcher",
    "BundleError",
    "CalibrationError",
    "Chat",
    "CheckpointError",
    "Completion",
    "Conversation",
    "Counts",
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
    return getattr(import_module(f"{__name__}.runtime.{_LAZY[name]}"), name)
