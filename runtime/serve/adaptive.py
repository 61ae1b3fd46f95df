"""Which of several tested settings a request gets, by how long others wait. Knows no request and no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from ..decode.config import GenerationConfig
from ..errors import MarsError, SessionError
from ..session.session import Session

EXACT = "exact"


class Adaptive:
    """An ordered list of levels, the best first, and the one that new requests get now.

    A level is left for the next, faster one when the longest wait reaches `high` seconds, one level in
    `hold` seconds at most; and for the one before after every `hold` seconds in which all waits stayed below
    `low`. Between the two nothing changes. May be used from any thread.
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
        self._changed = -float("inf")  # when the level was
        self._quiet = clock()  # since when no wait was as long as `low`

    @property
    def level(self) -> int:
        return self._level

    def choose(self, waiting: float) -> int:
        """The level of a request that comes now, when the oldest that waits has done so for so long."""
        with self._lock:
            self._saw(waiting)
            return self._level

    def saw(self, waited: float) -> None:
        """A request began after so many seconds."""
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
            # Nobody may have come for long: one level for each time of quiet.
            fallen = int((now - max(self._quiet, self._changed)) / self._hold)
            if fallen > 0:
                self._level, self._changed = max(0, self._level - fallen), now


def read_levels(session: Session, names: Sequence[str]) -> dict[str, GenerationConfig]:
    """The settings of each level. Raises SessionError for a profile that is not there, or stale, and for an
    order in which a later level is not bolder.
    """
    found = {}
    for name in names:
        try:
            found[name] = GenerationConfig() if name == EXACT else session.profile(name)
        except MarsError as error:
            raise SessionError(f"--adaptive {name}: {error}") from error
        session.check(found[name])
    if EXACT in names and names[0] != EXACT:
        raise SessionError(f"--adaptive {','.join(names)}: exact is the best there is; name it first")
    previous: tuple[str, GenerationConfig] | None = None
    for name, config in found.items():
        if config.tau is None:
            continue
        if previous is not None and not _is_bolder(config, previous[1]):
            raise SessionError(
                f"--adaptive: {name} (tau {config.tau:g}) does not come after {previous[0]}"
                f" (tau {previous[1].tau:g}): name the most careful one first"
            )
        previous = (name, config)
    return found


def _is_bolder(config: GenerationConfig, than: GenerationConfig) -> bool:
    """Taus of two metrics do not compare."""
    assert config.tau is not None and than.tau is not None, "levels after exact have a tau"
    if config.metric != than.metric:
        return True
    return config.tau >= than.tau if config.metric == "entropy" else config.tau <= than.tau
