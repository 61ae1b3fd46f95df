"""Times steps of a session: wall and CPU clocks, interleaved rounds, and the part outside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime

from mars_export import GenerationConfig, Session
from mars_export.runtime.decode.backend import Backend

CURSOR = 128
PROMPT = [1 + i % 200 for i in range(CURSOR)]

Work = Callable[[], object]
Steps = list[tuple[float, float]]
"""(seconds outside ONNX Runtime, seconds in all) of each step."""


@dataclass(slots=True)
class Times:
    """Wall and CPU milliseconds of something done again and again."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, work: Work) -> None:
        wall, cpu = perf_counter(), process_time()
        work()
        self.wall.append(1000 * (perf_counter() - wall))
        self.cpu.append(1000 * (process_time() - cpu))

    def summary(self) -> dict[str, float]:
        found = {"median": median(self.wall), "smallest": min(self.wall), "smallest_cpu": min(self.cpu)}
        return {name: round(value, 3) for name, value in found.items()}

    def __str__(self) -> str:
        return "{median:.1f} ({smallest:.1f}, cpu {smallest_cpu:.1f})".format_map(self.summary())


def one_round(works: Mapping[Any, Work], times: Mapping[Any, Times], repeats: Callable[[Any], int]) -> None:
    """Each work once, because another's weights are in the processor's cache, and then with the clock."""
    for name, work in works.items():
        work()
        for _ in range(repeats(name)):
            times[name].measure(work)


def step_of(backend: Backend, slots: int, cursor: int, capacity: int) -> Work:
    cache = backend.new_cache(1)
    cache.reserve(capacity)
    ids, index = np.full((1, slots), 5, np.int64), np.arange(slots, dtype=np.int64)[None]
    return lambda: backend.step(cache, 0, ids, np.array([cursor], np.int64), index, False)


@contextmanager
def clocked(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Seconds inside ONNX Runtime's runs, summed in the list's one entry."""
    inside, plain = [0.0], onnxruntime.InferenceSession.run_with_iobinding

    def run(*arguments: Any) -> None:
        begun = clock()
        plain(*arguments)
        inside[0] += clock() - begun

    with patch.object(onnxruntime.InferenceSession, "run_with_iobinding", run):
        yield inside


def steps_of_an_answer(session: Session, tokens: int, clock: Callable[[], float]) -> Steps:
    """One answer at tau 1, one slot a step; the prompt's steps are left out."""
    found: Steps = []
    with clocked(clock) as inside:
        stream = session.stream(PROMPT, GenerationConfig(tau=1.0, max_new_tokens=tokens, eos_ids=()))
        events = iter(stream)
        while not next(events).token_ids:
            pass
        while True:
            before, begun = inside[0], clock()
            if next(events, None) is None:
                return found
            whole = clock() - begun
            found.append((whole - (inside[0] - before), whole))
