"""What an operator decides about a server. Values are checked where they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..decode.schedule import Limits
from ..errors import SessionError

MOST_CHOICES = 16  # answers to one request
MOST_PROMPTS = 64  # of one text completion
MOST_CONNECTIONS = 1024
HEADER_BYTES = 32 * 1024  # of a request line and all headers
SECONDS = (
    *("request_timeout", "queue_timeout", "body_timeout", "header_timeout", "write_timeout"),
    *("idle_timeout", "ping", "high_queue", "low_queue", "hold"),
)


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
    max_body: int = 4 << 20
    request_timeout: float = 600.0
    queue_timeout: float = 60.0
    body_timeout: float = 30.0
    header_timeout: float = 10.0
    write_timeout: float = 30.0
    idle_timeout: float = 5.0
    drain: float = 30.0
    ping: float = 10.0
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    adaptive: tuple[str, ...] = ()
    high_queue: float = 0.5
    low_queue: float = 0.1
    hold: float = 5.0

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be a number of seconds above 0, not {getattr(self, name)!r}"
            for name in SECONDS
            if not (_is_number(getattr(self, name)) and getattr(self, name) > 0)
        ]
        if not (_is_number(self.drain) and self.drain >= 0):
            wrong.append(f"drain must be a number of seconds, 0 or more, not {self.drain!r}")
        if not isinstance(self.max_body, int) or isinstance(self.max_body, bool) or self.max_body < 1:
            wrong.append(f"max_body must be a number of bytes above 0, not {self.max_body!r}")
        if not wrong and self.low_queue >= self.high_queue:
            wrong.append(f"low_queue {self.low_queue:g} must be less than high_queue {self.high_queue:g}")
        if len(set(self.adaptive)) != len(self.adaptive):
            wrong.append(f"adaptive names a setting twice: {', '.join(self.adaptive)}")
        if any(not key for key in self.keys):
            wrong.append("an API key is empty")
        if wrong:
            raise SessionError("; ".join(wrong))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
