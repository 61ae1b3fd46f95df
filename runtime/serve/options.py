"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ..decode.limits import Limits
from ..errors import SessionError
from ..rules import broken, integer, number

MAX_CHOICES = 16  # answers to one request
MAX_PROMPTS = 64  # of one text completion
MAX_CONNECTIONS = 1024
HEADER_BYTES = 32 * 1024  # of a request line and all headers
Seconds = Annotated[float, number("a number of seconds above 0", above=True)]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Times are in seconds. Raises a SessionError that lists every value out of range.

    limits: of each bundle's batcher
    fits_rows: whether an engine with fewer rows than `limits.max_rows` lowers that limit
    max_body: bytes of a request
    request_timeout: for an answer, with its wait
    queue_timeout: for the wait
    body_timeout, header_timeout: for receiving a request
    write_timeout: for a client that does not read
    keep_alive: for a connection without a request
    drain: for running answers at shutdown
    ping: of silence, after which a stream sends a comment
    keys: API keys; without any, everyone may use the server
    cors_origins: foreign pages that may call
    hosts: allowed Host headers; None for any
    adaptive: profiles of each bundle, or "exact", from careful to fast; the load chooses among them
    high_queue: wait from which on the next of them is used
    max_models: most bundles that are open at once; None for all
    max_model_bytes: of the graphs and weights of open bundles; a single one may be larger
    low_queue, hold: all waits below `low_queue` for `hold` seconds return to the previous one
    """

    limits: Limits = field(default_factory=Limits)
    fits_rows: bool = False
    max_body: Annotated[int, integer(1, "a number of bytes above 0")] = 4 << 20
    request_timeout: Seconds = 600.0
    queue_timeout: Seconds = 60.0
    body_timeout: Seconds = 30.0
    header_timeout: Seconds = 10.0
    write_timeout: Seconds = 30.0
    keep_alive: Seconds = 75.0
    drain: Annotated[float, number("a number of seconds, 0 or more")] = 30.0
    ping: Seconds = 10.0
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    adaptive: tuple[str, ...] = ()
    max_models: Annotated[int | None, integer(1, "1 or more")] = None
    max_model_bytes: Annotated[int | None, integer(1, "a number of bytes above 0")] = None
    high_queue: Seconds = 0.5
    low_queue: Seconds = 0.1
    hold: Seconds = 5.0

    def __post_init__(self) -> None:
        wrong = list(broken(self).values())
        if not wrong and self.low_queue >= self.high_queue:
            wrong.append(f"low_queue {self.low_queue:g} must be less than high_queue {self.high_queue:g}")
        if len(set(self.adaptive)) != len(self.adaptive):
            wrong.append(f"adaptive names a setting twice: {', '.join(self.adaptive)}")
        if any(not key for key in self.keys):
            wrong.append("an API key is empty")
        if wrong:
            raise SessionError("; ".join(wrong))
