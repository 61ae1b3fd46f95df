"""Decodes task rows at one setting as a service does, and records the time of each event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from ...runtime.batcher.batcher import Batcher
from ...runtime.decode.blocks import BlockSchedule, check_blocks
from ...runtime.decode.schedule import Limits, run
from ...runtime.decode.stats import Stats
from ...runtime.machine import forget_peak, peak
from ...runtime.session.session import Session
from ..rounds import slices
from ..tasks.scores import Output
from ..tasks.tasks import Task
from .settings import Setting

DIGITS = 6  # of recorded seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """An answer and its times in seconds, as its reader sees them.

    `ttft` is the time from the request to the first event with tokens; None if there was none. `gaps` are the
    times between events with tokens; an event brings all tokens that one step accepted.
    """

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    finish_reason: str
    ttft: float | None
    gaps: tuple[float, ...]
    proposed: int = 0
    verified: int = 0
    forced: int = 0

    @classmethod
    def of(
        cls, text: str, ids: Sequence[int], stats: Stats, reason: str, start: float, events: Sequence[float]
    ) -> Timeline:
        """From the clock times of the request and of its `events` with tokens."""
        first = round(events[0] - start, DIGITS) if events else None
        gaps = tuple(round(after - before, DIGITS) for before, after in pairwise(events))
        counts = (stats.proposed, stats.verified, stats.forced)
        return cls(text, tuple(ids), stats.forwards, reason, first, gaps, *counts)

    @property
    def output(self) -> Output:
        return Output(self.text, self.token_ids)

    @property
    def seconds(self) -> float | None:
        """From the request to the last event with tokens."""
        return None if self.ttft is None else self.ttft + sum(self.gaps)

    @property
    def tpot(self) -> float | None:
        """Time per output token: from the first event to the last, for all tokens but one. None for one
        token.
        """
        return sum(self.gaps) / (len(self.token_ids) - 1) if len(self.token_ids) > 1 else None


@dataclass(frozen=True, slots=True)
class Lap:
    """Rows decoded once at one setting: wall-clock seconds, and the process's peak memory in bytes."""

    seconds: float
    peak_memory: int | None
    answers: tuple[Timeline, ...]

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def serve(session: Session, tasks: Sequence[Task], setting: Setting) -> Lap:
    """Decode all tasks, at most `setting.batch` at once, with a Batcher, or with block commit in batches."""
    has_peak = forget_peak()
    start = perf_counter()
    if setting.commit.kind == "cursor":
        answers = _by_service(session, tasks, setting)
    else:
        parts = slices(tasks, setting.batch)
        answers = [answer for part in parts for answer in _by_blocks(session, part, setting)]
    seconds = perf_counter() - start
    return Lap(seconds, (peak() or None) if has_peak else None, tuple(answers))


def _by_service(session: Session, tasks: Sequence[Task], setting: Setting) -> list[Timeline]:
    """Keep the batch full: as many clients as it has rows, each with one request at a time."""
    # The Batcher closes first, which ends running requests, so that an error or Ctrl-C waits for no client.
    limits = Limits(max_rows=setting.batch)
    with ThreadPoolExecutor(setting.batch) as clients, Batcher(session, limits) as service:
        waiting = [clients.submit(_ask, service, task, setting) for task in tasks]
        try:
            return [answer.result() for answer in waiting]
        except BaseException:
            clients.shutdown(wait=False, cancel_futures=True)
            raise


def _ask(service: Batcher, task: Task, setting: Setting) -> Timeline:
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
    return Timeline.of(text, token_ids, request.stats, reason, start, events)


def _by_blocks(session: Session, tasks: Sequence[Task], setting: Setting) -> Iterator[Timeline]:
    """`generate_batch` with block commit, with the time of every step."""
    manifest, start = session.bundle.manifest, perf_counter()
    streams = [session.new_row(i, t.source, setting.config(t.max_new_tokens)) for i, t in enumerate(tasks)]
    rows, size = [row for row, _ in streams], setting.commit.cache_block
    events: list[list[float]] = [[] for _ in streams]
    check_blocks(session.backend, rows, size)
    limits = Limits.of_rows(max(1, len(rows)))
    schedule = BlockSchedule(session.backend, manifest.block, manifest.mask_id, limits, size)
    for step in run(schedule, rows):
        now = perf_counter()
        for event in step:
            if event.error is not None:
                raise event.error
            if event.token_ids:
                events[event.row].append(now)
    for (row, text), times in zip(streams, events, strict=True):
        if text is not None:
            text.finish()
        shown, ids = text.text if text is not None else "", row.tokens[row.stats.prompt_tokens :]
        yield Timeline.of(shown, ids, row.stats, row.finish_reason or "cancelled", start, times)
