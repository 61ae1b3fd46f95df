"""The limits of a service, on running work and on single requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import SessionError
from ..rules import broken, integer, num_bytes, number
from .config import GenerationConfig

PREFILL_CHUNK = 256  # prompt tokens of one prefill forward when no other requests wait
MAX_PLACES = 2**20
Count = Annotated[int, integer(1, "1 or more")]
Maximum = Annotated[int | None, integer(1, "1 or more")]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on running work and on single requests; None means no limit.

    Limits:
    max_rows: Requests that run at once.
    max_rows_per_client: Requests that run at once for one client: in `serve` an API key, or an address if
        there are no keys. Its other requests wait, even for free rows.
    max_waiting: Requests that may wait, not counting the next ones for free rows; further ones are refused,
        by `serve` with status 429.
    max_prompt_tokens: Maximum tokens of a prompt; the context by default.
    max_new_tokens: Maximum tokens of an answer; the context by default.
    kv_bytes: KV memory of all requests, such as 2G.
    cache_block: With a tau, tokens whose KV entries become final together: 1 is cursor commit, more the
        paper's block commit.

    Python only:
    prefill_tokens: Maximum prompt tokens that are prefilled between two decode steps. With more, a new
        request answers sooner; with fewer, it disturbs running requests less.
    max_stops: Maximum stop strings, and eos_ids.
    client_share: The part of all places, running and waiting, that one client may have: above 0, at most 1.

    With kv_bytes, a request starts as soon as one of max_rows is free and the memory that running requests
    leave has room for its prompt and max_new_tokens; on a GPU each may have an equal share. At most 4 x
    max_rows requests pass one that waits for memory, then no other starts before it. Raises SessionError for
    invalid values.
    """

    max_rows: Count = 8
    max_waiting: Count = 64
    prefill_tokens: Count = 128
    max_prompt_tokens: Maximum = None
    max_new_tokens: Maximum = None
    max_stops: Maximum = None
    kv_bytes: Annotated[int | None, num_bytes()] = None
    client_share: Annotated[float, number("a number above 0, at most 1", high=1, above=True)] = 1.0
    max_rows_per_client: Maximum = None
    cache_block: Count = 1

    def __post_init__(self) -> None:
        problems = broken(self)
        for name in ("max_rows", "max_waiting"):
            if not problems and getattr(self, name) > MAX_PLACES:
                problems[name] = f"{name} must be at most {MAX_PLACES}, not {getattr(self, name)!r}"
        if problems:
            raise SessionError("; ".join(problems.values()), field=next(iter(problems)))

    @property
    def max_of_client(self) -> int:
        """Requests that one client may have, running and waiting."""
        return max(1, int(self.client_share * (self.max_rows + self.max_waiting)))

    @property
    def max_answers(self) -> int:
        """The most requests of one client that could ever run and wait at once."""
        rows = min(self.max_rows, self.max_rows_per_client or self.max_rows)
        return min(self.max_of_client, rows + self.max_waiting)

    def check(self, config: GenerationConfig) -> None:
        """Raise SessionError if `config` asks for more than these limits allow."""
        requests = [
            ("max_new_tokens", "max_new_tokens", config.max_new_tokens, self.max_new_tokens),
            ("stop", "stop strings", len(config.stop), self.max_stops),
            ("eos_ids", "eos_ids", len(config.eos_ids or ()), self.max_stops),
        ]
        problems = {
            field: f"{asked} {name} are requested, this service allows at most {limit}; request fewer"
            for field, name, asked, limit in requests
            if limit is not None and asked > limit
        }
        if problems:
            field = next(iter(problems))
            raise SessionError("; ".join(problems.values()), code="limit_exceeded", field=field)

    @classmethod
    def of_rows(cls, num_rows: int, cache_block: int = 1) -> Limits:
        """For sequences that no other request waits for."""
        return cls(num_rows, prefill_tokens=PREFILL_CHUNK, cache_block=cache_block)
