"""Predicts speeds from forwards and the cost of a step, and the rest of a calibration's time."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session


def row_seconds(
    session: Session, config: GenerationConfig, batch: int, prompt: float, tokens: float, forwards: float
) -> float:
    """Predicted seconds of a row with all masks, `batch` rows at once."""
    cost, masks = session.cost, 0 if config.one_token else session.bundle.manifest.block - 1
    forwards = max(1, forwards)  # a grammar can force a whole answer
    positions = batch * (tokens / forwards + masks)
    return cost.of(prompt + masks) + (forwards - 1) * cost.of(positions) / batch


class Clock:
    """The rows of planned phases, in their order. `seconds`: a first guess of a row's time."""

    def __init__(self, planned: Mapping[str, int], seconds: float) -> None:
        self._left, self._phase, self._start = dict(planned), "", time.monotonic()
        self._seconds, self._done = seconds, 1

    def at(self, phase: str, done: int, total: int) -> None:
        """Note the rows done of a phase. The phases planned before it are over."""
        if phase == self._phase:  # rows that are known when it begins take no time
            self._done += max(0, self._left[phase] - (total - done))
        for other in list(self._left) if phase in self._left else ():
            if other == phase:
                break
            self._left[other] = 0
        self._phase, self._left[phase] = phase, total - done

    def __str__(self) -> str:
        """The most time left."""
        seconds = sum(self._left.values()) * (self._seconds + time.monotonic() - self._start) / self._done
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
