"""The levels of `--adaptive`: faster settings while requests wait too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic

from ..decode.config import GenerationConfig
from ..errors import MarsError, SessionError
from ..session.session import Session
from .options import ServeOptions

EXACT = "exact"


class Adaptive:
    """The levels of `--adaptive`, the best first, and the current one. Thread-safe.

    The next, faster level follows when a wait reaches `high_queue` seconds, at most once in `hold` seconds.
    The previous level follows after `hold` seconds in which all waits were below `low_queue`.
    """

    def __init__(self, options: ServeOptions, clock: Callable[[], float] = monotonic) -> None:
        self.names, self._options, self._clock = options.adaptive, options, clock
        self._lock = threading.Lock()
        self._level = 0
        self._changed = -float("inf")  # time of the last change
        self._quiet = clock()  # since then, all waits were below `low_queue`

    def level(self, waited: float, *, choose: bool) -> int:
        """The level of a new request, if another one waits, or had to wait, for `waited` seconds. `choose`:
        from now on; else nothing changes.
        """
        with self._lock:
            now = self._clock()
            level = self._level_at(now, waited)
            if choose and waited >= self._options.low_queue:
                self._quiet = now
            if choose and level != self._level:
                self._level, self._changed = level, now
            return level

    def _level_at(self, now: float, waited: float) -> int:
        options = self._options
        if waited >= options.high_queue:
            is_next = now - self._changed >= options.hold and self._level + 1 < len(self.names)
            return self._level + is_next
        quiet = now if waited >= options.low_queue else self._quiet
        # Requests may be rare: one level for each quiet period.
        return max(0, self._level - max(0, int((now - max(quiet, self._changed)) / options.hold)))


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
    if EXACT in names and names[0] != EXACT:
        raise SessionError(f"--adaptive {','.join(names)}: exact is the most careful setting; name it first")
    profiles = [(name, config) for name, config in levels.items() if config.tau is not None]
    for (previous, careful), (name, config) in pairwise(profiles):
        if not _is_bolder(config, careful):
            raise SessionError(
                f"--adaptive: {name} (tau {config.tau:g}) does not come after {previous}"
                f" (tau {careful.tau:g}): name the most careful one first"
            )
    return levels


def _is_bolder(config: GenerationConfig, than: GenerationConfig) -> bool:
    """Taus of different metrics cannot be compared; any order is allowed."""
    assert config.tau is not None and than.tau is not None, "exact mode is not compared"
    if config.metric != than.metric:
        return True
    return config.tau >= than.tau if config.metric == "entropy" else config.tau <= than.tau
