"""What an operator decides about a server. Values are checked where they are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ..decode.schedule import Limits
from ..errors import SessionError
from ..rules import broken, integer, number

MOST_CHOICES = 16  # answers to one request
MOST_PROMPTS = 64  # of one text completion
MOST_CONNECTIONS = 1024
HEADER_BYTES = 32 * 1024  # of a request line and all headers
Seconds = Annotated[float, number("a number of seconds above 0", above=True)]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """limits: of each bundle's batcher; with fits_rows an engine of fewer rows takes as many as it has.
    max_body: bytes of a request. request_timeout: seconds for a whole answer, queue_timeout: for its wait for
    a row, body_timeout and header_timeout: for a request to come, write_timeout: for a client to take what is
    sent, idle_timeout: for a connection without a request. drain: seconds that running answers get at the
    end. ping: seconds of silence after which a stream says that it lives.

    keys: API keys, none for a server that anybody may use. cors_origins: pages of others that may call.
    hosts: names that a Host header may have, None for any. adaptive: profiles of each bundle, or "exact", the
    best first, of which the load chooses. high_queue, low_queue: seconds of waiting from which the next one
    is taken, and below which, for `hold` seconds, the one before.

    Raises SessionError that lists every value out of range.
    """

    limits: Limits = field(default_factory=Limits)
    fits_rows: bool = False
    max_body: Annotated[int, integer(1, "a number of bytes above 0")] = 4 << 20
    request_timeout: Seconds = 600.0
    queue_timeout: Seconds = 60.0
    body_timeout: Seconds = 30.0
    header_timeout: Seconds = 10.0
    write_timeout: Seconds = 30.0
    idle_timeout: Seconds = 5.0
    drain: Annotated[float, number("a number of seconds, 0 or more")] = 30.0
    ping: Seconds = 10.0
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    adaptive: tuple[str, ...] = ()
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
