"""Export MARS multi-token language models and run them anywhere. The front door; it loads lazily."""

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
    from .runtime.answer import Completion as Completion
    from .runtime.answer import Event as Event
    from .runtime.batcher import Batcher as Batcher
    from .runtime.decode.config import GenerationConfig as GenerationConfig
    from .runtime.decode.schedule import Limits as Limits
    from .runtime.session import Session as Session

__version__ = "0.1.0"

# These bring numpy, the tokenizer and a backend: `mars-export --help` and an error's name need none of them.
_LAZY = ("Batcher", "Completion", "Event", "GenerationConfig", "Limits", "Session")

__all__ = [
    "__version__",
    "Batcher",
    "BundleError",
    "CalibrationError",
    "CheckpointError",
    "Completion",
    "Event",
    "ExportError",
    "GenerationConfig",
    "Limits",
    "MarsError",
    "Overloaded",
    "Session",
    "SessionError",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.runtime"), name)
