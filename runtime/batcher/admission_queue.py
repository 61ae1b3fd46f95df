"""Admission to a batcher: its places, the shares of its clients, and counts of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace

from ..decode.limits import Limits
from ..decode.stats import Stats
from ..errors import Overloaded

MAX_RETRY = 60.0  # seconds, the most of `retry_after`
RECENT = 8  # finished requests, about, from which the time of a request is estimated


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests since a batcher was created.

    accepted: given a place. Each ends as one of finished, failed, cancelled and expired.
    finished: answered completely.
    failed: ended by an error.
    cancelled: ended by their readers or by `close`.
    expired: ended by their deadline.
    refused: not accepted, because the request was invalid or the batcher closed.
    overloaded: not accepted for lack of room.
    prompt_tokens: of accepted requests that have ended.
    tokens: generated for these.
    """

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    overloaded: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


class AdmissionQueue:
    """The places that `limits` allows. Not thread-safe: the batcher's lock guards them."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.counts = limits, Counts()
        self.num_admitting = 0  # requests that have a place while their prompts are tokenized
        self._clients: Counter[Hashable] = Counter()  # requests by client, None included
        self._seconds = 0.0  # from the first forward of a request to its end, estimated

    def refusal(self, client: Hashable, num_rows: int, num_queued: int) -> Overloaded | None:
        """Why `client` gets no place now, in a batch of `num_rows` sequences; None if it does.

        `num_queued` requests have no sequence yet, including ended ones that the current step still holds.
        """
        # The second term bounds the queue, however fast requests are sent and cancelled during a step.
        waiting = max(self._num_waiting(client, num_rows), num_queued + 1 - self.limits.max_rows)
        if waiting > self.limits.max_waiting:
            words = f"{waiting - 1} requests wait already (max_waiting)"
        elif client is not None and self._clients[client] >= self.limits.max_of_client:
            words = f"this client has {self._clients[client]} requests here already (client_share)"
        else:
            return None
        retry = min(MAX_RETRY, max(1.0, self._seconds * waiting / self.limits.max_rows))
        return Overloaded(f"{words}; try again in {retry:.0f} s", retry)

    def _num_waiting(self, client: Hashable, num_rows: int) -> int:
        """Requests without a free sequence, with one more of `client`. A request that will get a free
        sequence between two steps does not count.
        """
        total, limit = self._clients.total() + 1, self.limits.max_rows_per_client
        if limit is None:
            return total - min(num_rows, total)
        numbers = {**self._clients, client: self._clients[client] + 1}
        served = sum(number if name is None else min(number, limit) for name, number in numbers.items())
        return total - min(num_rows, served)

    def admit(self, client: Hashable) -> None:
        """Take a place."""
        self.num_admitting += 1
        self._clients[client] += 1

    def accept(self) -> None:
        """The place has its request."""
        self.num_admitting -= 1
        self.count(accepted=1)

    def release(self, client: Hashable, *, refused: bool = True) -> None:
        """Return a place whose request was refused, or was cancelled before it was accepted."""
        self.num_admitting -= 1
        self.forget(client)
        self.count(refused=int(refused))

    def end(self, client: Hashable, outcome: str, stats: Stats) -> None:
        """A request of `client` has ended. `outcome` names its count."""
        self.forget(client)
        self.count(prompt_tokens=stats.prompt_tokens, tokens=stats.tokens, **{outcome: 1})
        if outcome == "finished":
            seconds = stats.prefill_time + stats.decode_time
            self._seconds += (seconds - self._seconds) / min(self.counts.finished, RECENT)

    def forget(self, client: Hashable) -> None:
        """Free the place of a request of `client` that has ended."""
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    def count(self, **more: int) -> None:
        """Add to the counts of these names."""
        counts = self.counts
        self.counts = replace(counts, **{name: getattr(counts, name) + n for name, n in more.items()})
