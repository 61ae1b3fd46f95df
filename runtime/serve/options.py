"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ..decode.limits import Limits
from ..errors import SessionError
from ..rules import Rule, broken, integer, num_bytes, seconds

MAX_CHOICES = 16  # answers to one request
MAX_PROMPTS = 64  # of one text completion
MAX_CONNECTIONS = 1024
HEADER_BYTES = 32 * 1024  # of a request line and all headers
Seconds = Annotated[float, seconds()]
LEVELS = Rule(
    "different names", lambda names: isinstance(names, tuple) and len(set(names)) == len(names), "NAME,..."
)


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

    Load:
    adaptive: Profiles for requests that set neither exact nor tau, or "exact", the most careful first. The
        server starts with the first and moves on to the next while requests wait too long.

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
    high_queue: Wait for a row from which on the next level of `adaptive` is used.
    low_queue: If all waits are below it for `hold` seconds, the previous level returns.
    hold: See `low_queue`; also the shortest time between two higher levels.
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
    adaptive: Annotated[tuple[str, ...], LEVELS] = ()
    max_models: Annotated[int | None, integer(1, "1 or more")] = None
    max_model_bytes: Annotated[int | None, num_bytes()] = None
    high_queue: Seconds = 0.5
    low_queue: Seconds = 0.1
    hold: Seconds = 5.0

    def __post_init__(self) -> None:
        wrong = list(broken(self).values())
        if not wrong and self.low_queue >= self.high_queue:
            wrong.append(f"low_queue {self.low_queue:g} must be less than high_queue {self.high_queue:g}")
        if any(not key for key in self.keys):
            wrong.append("an API key is empty")
        if wrong:
            raise SessionError("; ".join(wrong))
