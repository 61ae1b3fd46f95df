"""Decodes rows at one setting as a service does, with continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from ..runtime.batcher.batcher import Batcher
from ..runtime.decode.limits import Limits
from ..runtime.decode.stats import Stats
from ..runtime.session.session import Session
from .options import Setting
from .tasks.scores import Output
from .tasks.tasks import TaskRow


@dataclass(frozen=True, slots=True)
class Timeline:
    """An answer and its times in seconds, as its reader sees them.

    `ttft` is the time from the request to the first event with tokens; None if there was none. `gaps` are the
    times between events with tokens; an event brings all tokens that one step accepted.
    """

    output: Output
    stats: Stats
    finish_reason: str
    ttft: float | None
    gaps: tuple[float, ...]

    @classmethod
    def of(cls, output: Output, stats: Stats, reason: str, start: float, events: Sequence[float]) -> Timeline:
        """From the clock times of the request and of its `events` with tokens."""
        gaps = tuple(after - before for before, after in pairwise(events))
        return cls(output, stats, reason, events[0] - start if events else None, gaps)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.output.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def forwards(self) -> int:
        return self.stats.forwards

    @property
    def seconds(self) -> float | None:
        """From the request to the last event with tokens."""
        return None if self.ttft is None else self.ttft + sum(self.gaps)

    @property
    def tpot(self) -> float | None:
        """Time per output token: from the first event to the last, for all tokens but one; None for one."""
        return sum(self.gaps) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def serve(session: Session, tasks: Sequence[TaskRow], setting: Setting) -> list[Timeline]:
    """Decode all tasks with a Batcher that is kept full: as many clients as it has rows, each with one
    request at a time."""
    # The Batcher closes first, which ends running requests, so that an error or Ctrl-C waits for no client.
    with (
        ThreadPoolExecutor(setting.batch) as clients,
        Batcher(session, Limits(max_rows=setting.batch)) as service,
    ):
        waiting = [clients.submit(_ask, service, task, setting) for task in tasks]
        try:
            return [answer.result() for answer in waiting]
        except BaseException:
            clients.shutdown(wait=False, cancel_futures=True)
            raise


def _ask(service: Batcher, task: TaskRow, setting: Setting) -> Timeline:
    text, reason = "", "cancelled"
    token_ids: list[int] = []
    events: list[float] = []
    start = perf_counter()
    request = service.submit(task.source, task.config(setting.config(task.max_new_tokens)))
    for event in request:
        if event.token_ids:
            events.append(perf_counter())
        text += event.text
        token_ids += event.token_ids
        reason = event.finish_reason or reason
    return Timeline.of(Output(text, tuple(token_ids)), request.stats, reason, start, events)
