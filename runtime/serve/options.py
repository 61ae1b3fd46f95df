"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ..decode.limits import Limits
from ..errors import SessionError
from ..rules import broken, integer, num_bytes, seconds

MAX_CHOICES = 16  # answers to one request
MAX_PROMPTS = 64  # of one text completion
MAX_CONNECTIONS = 1024
HEADER_BYTES = 32 * 1024  # of a request line and all headers
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LogFormat = Literal["text", "json"]
Seconds = Annotated[float, seconds()]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Times are in seconds. Raises a SessionError that lists every value out of range.

    Limits:
    max_models: Bundles that are open at once; all by default.
    max_model_bytes: Graphs and weights of the bundles that are open at once, such as 8G; a single one may be
        larger.
    max_body: Largest request body; 4M by default.
    request_timeout: Maximum seconds per request, including the time in the queue.
    queue_timeout: Seconds that a request may wait.
    drain_timeout: Seconds that running requests have to finish after SIGTERM. A second signal exits at once.
    keep_alive: Seconds that an idle connection is kept. Behind a proxy, more than the proxy's own.

    Python only:
    limits: Of each bundle's batcher.
    fits_rows: Whether an engine with fewer rows than `limits.max_rows` lowers that limit.
    body_timeout: For receiving the body of a request.
    header_timeout: For receiving its head.
    write_timeout: For a client that does not read.
    ping: Of silence, after which a stream sends a comment.
    keys: API keys; without any, everyone may use the server.
    cors_origins: Foreign pages that may call; "*" for any.
    hosts: Allowed Host headers; None for any.
    """

    limits: Limits = field(default_factory=Limits)
    fits_rows: bool = False
    max_body: Annotated[int, num_bytes()] = 4 << 20
    request_timeout: Seconds = 600.0
    queue_timeout: Seconds = 60.0
    body_timeout: Seconds = 30.0
    header_timeout: Seconds = 10.0
    write_timeout: Seconds = 30.0
    keep_alive: Seconds = 75.0
    drain_timeout: Annotated[float, seconds(above=False)] = 30.0
    ping: Seconds = 10.0
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    max_models: Annotated[int | None, integer(1, "1 or more")] = None
    max_model_bytes: Annotated[int | None, num_bytes()] = None

    def __post_init__(self) -> None:
        problems = broken(self)
        if any(not key for key in self.keys):
            problems["keys"] = "an API key is empty"
        if problems:
            raise SessionError("; ".join(problems.values()), field=next(iter(problems)))
