"""Predicts speeds from forwards and the cost of a step, and the rest of a calibration's time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session


def row_seconds(
    session: Session, config: GenerationConfig, batch: int, prompt: float, steps: Sequence[float]
) -> float:
    """Predicted seconds of a row with all masks, `batch` rows at once. `steps`: their tokens, which the next
    one feeds."""
    cost, masks = session.cost, 0 if config.one_token else session.bundle.manifest.block - 1
    later = sum(cost.of(batch * (tokens + masks)) for tokens in steps[:-1])
    return cost.of(prompt + masks) + later / batch


class Clock:
    """The rows of planned phases, in their order. `seconds`: a first guess of a row's time."""

    def __init__(self, planned: Mapping[str, int], seconds: float) -> None:
        self._planned, self._left = planned, dict(planned)
        self._phase, self._start = "", time.monotonic()
        self._seconds, self._done = seconds, 1

    def at(self, phase: str, done: int, total: int) -> None:
        """Note the rows done of a phase. Nothing else is left in the last one."""
        left = max(total, self._planned.get(phase, 0)) - done
        if phase == self._phase:  # rows that are known when it begins take no time
            self._done += max(0, self._left[phase] - left)
        if phase in [*self._planned][-1:]:
            self._left = {}
        self._phase, self._left[phase] = phase, left

    def __str__(self) -> str:
        """The most time left."""
        seconds = sum(self._left.values()) * (self._seconds + time.monotonic() - self._start) / self._done
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
