"""Who may come in: places in a batcher, the shares of its clients, and what was done with them. Takes no
lock of its own and runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

from ..decode.schedule import Limits
from ..errors import Overloaded
from .counts import Counts

LONGEST_RETRY = 60.0  # seconds that a refused client is told to wait, at most
RECENT = 8  # finished requests that the guess of a retry rests on, about


class Places:
    """The places that `limits` gives, guarded by whoever owns them."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.counts = limits, Counts()
        self.num_entering = 0  # taken, while their prompts are tokenized
        self._clients: Counter[Hashable] = Counter()  # requests that are here, nobody's too
        self._seconds = 0.0  # that a request takes from its first forward on, about

    def refusal(self, client: Hashable, num_rows: int, num_held: int) -> Overloaded | None:
        """Why there is no place for `client` now, in a batch of `num_rows` rows. `num_held` requests have
        none yet, ended ones included: those are held until the step in hand is over.
        """
        # At most as many are held as there are places, whoever sends and cancels while a step runs.
        waiting = max(self._num_waiting(client, num_rows), num_held + 1 - self.limits.max_rows)
        if waiting > self.limits.max_waiting:
            words = f"{waiting - 1} requests wait already (max_waiting)"
        elif client is not None and self._clients[client] >= self.limits.max_of_client:
            words = f"this client has {self._clients[client]} requests here already (client_share)"
        else:
            return None
        retry = min(LONGEST_RETRY, max(1.0, self._seconds * waiting / self.limits.max_rows))
        return Overloaded(f"{words}; try again in {retry:.0f} s", retry)

    def _num_waiting(self, client: Hashable, num_rows: int) -> int:
        """Requests that no row is free for, with one more of `client`. Rows are taken between two steps:
        whoever has none yet does not wait for one where one is free.
        """
        here, most = self._clients.total() + 1, self.limits.max_rows_per_client
        if most is None:
            return here - min(num_rows, here)
        mine = {**self._clients, client: self._clients[client] + 1}
        served = sum(number if who is None else min(number, most) for who, number in mine.items())
        return here - min(num_rows, served)

    def enter(self, client: Hashable) -> None:
        """Take a place."""
        self.num_entering += 1
        self._clients[client] += 1

    def accept(self) -> None:
        """A place that was taken has its request."""
        self.num_entering -= 1
        self.count(accepted=1)

    def leave_in_vain(self, client: Hashable) -> None:
        """A place that was taken gets none."""
        self.num_entering -= 1
        self.forget(client)
        self.count(refused=1)

    def forget(self, client: Hashable) -> None:
        """A request of `client` is over."""
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    def count(self, **more: int) -> None:
        """Add to the counts of these names."""
        counts = self.counts
        self.counts = replace(counts, **{name: getattr(counts, name) + n for name, n in more.items()})

    def took(self, seconds: float) -> None:
        """A request finished, this long after its first forward."""
        self._seconds += (seconds - self._seconds) / min(self.counts.finished, RECENT)
