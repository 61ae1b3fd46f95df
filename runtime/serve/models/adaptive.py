"""Choosing among tested settings by how long requests wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from ...decode.config import GenerationConfig
from ...errors import MarsError, SessionError
from ...session.session import Session

EXACT = "exact"


class Adaptive:
    """An ordered list of levels, the best first, and the current one. Thread-safe.

    The next, faster level follows when the longest wait reaches `high` seconds, at most once in `hold`
    seconds. The previous level follows after `hold` seconds in which all waits were below `low`.
    """

    def __init__(
        self,
        names: Sequence[str],
        high: float,
        low: float,
        hold: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        assert names and low < high, "options are checked before"
        self.names = tuple(names)
        self._high, self._low, self._hold, self._clock = high, low, hold, clock
        self._lock = threading.Lock()
        self._level = 0
        self._changed = -float("inf")  # time of the last change
        self._quiet = clock()  # since then, all waits were below `low`

    @property
    def level(self) -> int:
        return self._level

    def choose(self, waiting: float) -> int:
        """The level of a new request, if the oldest waiting one has waited for `waiting` seconds."""
        with self._lock:
            self._saw(waiting)
            return self._level

    def saw(self, waited: float) -> None:
        """Note that a request waited for `waited` seconds."""
        with self._lock:
            self._saw(waited)

    def _saw(self, seconds: float) -> None:
        now = self._clock()
        if seconds >= self._low:
            self._quiet = now
        if seconds >= self._high:
            if now - self._changed >= self._hold and self._level + 1 < len(self.names):
                self._level, self._changed = self._level + 1, now
        elif self._level > 0:
            # Requests may be rare: one level for each quiet period.
            periods = int((now - max(self._quiet, self._changed)) / self._hold)
            if periods > 0:
                self._level, self._changed = max(0, self._level - periods), now


def read_levels(session: Session, names: Sequence[str]) -> dict[str, GenerationConfig]:
    """The settings of each level. Raises SessionError if a profile is unknown or stale, or if a later level
    is more careful than the one before.
    """
    levels = {}
    for name in names:
        try:
            levels[name] = GenerationConfig() if name == EXACT else session.profile(name)
        except MarsError as error:
            raise SessionError(f"--adaptive {name}: {error}") from error
        session.check(levels[name])
    if EXACT in names and names[0] != EXACT:
        raise SessionError(f"--adaptive {','.join(names)}: exact is the most careful setting; name it first")
    previous: tuple[str, GenerationConfig] | None = None
    for name, config in levels.items():
        if config.tau is None:
            continue
        if previous is not None and not _is_bolder(config, previous[1]):
            raise SessionError(
                f"--adaptive: {name} (tau {config.tau:g}) does not come after {previous[0]}"
                f" (tau {previous[1].tau:g}): name the most careful one first"
            )
        previous = (name, config)
    return levels


def _is_bolder(config: GenerationConfig, than: GenerationConfig) -> bool:
    """Taus of different metrics cannot be compared; any order is allowed."""
    assert config.tau is not None and than.tau is not None, "levels after exact have a tau"
    if config.metric != than.metric:
        return True
    return config.tau >= than.tau if config.metric == "entropy" else config.tau <= than.tau
