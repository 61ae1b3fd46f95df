"""bundle -> tokens. numpy and one backend; never torch."""

from mars_export.runtime.config import GenerationConfig
from mars_export.runtime.errors import BundleError, CalibrationError, CheckpointError, ExportError, MarsError, SessionError
from mars_export.runtime.session import Commit, Completion, Event, Session, Stream
from mars_export.runtime.stats import Stats

__all__ = [
    "BundleError",
    "CalibrationError",
    "CheckpointError",
    "Commit",
    "Completion",
    "Event",
    "ExportError",
    "GenerationConfig",
    "MarsError",
    "Session",
    "SessionError",
    "Stats",
    "Stream",
]
