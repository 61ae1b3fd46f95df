"""Decodes task rows at one setting as a service would, and notes when each event came. Compares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from ...runtime import Engine, Limits, Session
from ...runtime.decode.blocks import decode_blocks
from ...runtime.machine import forget_peak, peak
from ..tasks.tasks import Task
from ..tau.setting import Setting
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class Lap:
    """Rows decoded once at one setting: wall-clock `seconds` of them all, and the process's peak memory in bytes (None: unknown)."""

    seconds: float
    peak_memory: int | None
    answers: tuple[Timeline, ...]

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Lap:
        return cls(
            values["seconds"],
            values["peak_memory"],
            tuple(Timeline.from_dict(answer) for answer in values["answers"]),
        )


def serve(session: Session, tasks: Sequence[Task], setting: Setting) -> Lap:
    """Decode all tasks, at most `setting.batch` at once: with cursor commit through the engine, with block commit batch by batch."""
    is_known = forget_peak()
    began = perf_counter()
    answers = (
        _through_engine(session, tasks, setting)
        if setting.commit.kind == "cursor"
        else _in_batches(session, tasks, setting)
    )
    seconds = perf_counter() - began
    return Lap(seconds, (peak() or None) if is_known else None, tuple(answers))


def _through_engine(session: Session, tasks: Sequence[Task], setting: Setting) -> list[Timeline]:
    """As many clients as the batch has rows, each with one request at a time: the engine is always as full as it can be."""
    # The engine is left first: it ends what still runs, and no client is waited for after an error or Ctrl-C.
    with (
        ThreadPoolExecutor(setting.batch) as clients,
        Engine(session, Limits(max_rows=setting.batch)) as engine,
    ):
        waiting = [clients.submit(_ask, engine, task, setting) for task in tasks]
        try:
            return [answer.result() for answer in waiting]
        except BaseException:
            clients.shutdown(wait=False, cancel_futures=True)
            raise


def _ask(engine: Engine, task: Task, setting: Setting) -> Timeline:
    text, reason = "", "cancelled"
    token_ids: list[int] = []
    came: list[float] = []
    asked = perf_counter()
    request = engine.submit(task.prompt, setting.config(task.max_new_tokens))
    for event in request:
        if event.token_ids:
            came.append(perf_counter())
        text += event.text
        token_ids += event.token_ids
        reason = event.finish_reason or reason
    return Timeline.of(text, token_ids, request.stats.forwards, reason, asked, came)


def _in_batches(session: Session, tasks: Sequence[Task], setting: Setting) -> list[Timeline]:
    return [
        answer
        for start in range(0, len(tasks), setting.batch)
        for answer in _one_batch(session, tasks[start : start + setting.batch], setting)
    ]


def _one_batch(session: Session, tasks: Sequence[Task], setting: Setting) -> list[Timeline]:
    """What `generate_batch` does with block commit, with a look at the clock after every step."""
    manifest = session.bundle.manifest
    asked = perf_counter()
    made = [
        session.new_row(i, task.prompt, setting.config(task.max_new_tokens)) for i, task in enumerate(tasks)
    ]
    came: list[list[float]] = [[] for _ in made]
    rows = [row for row, _ in made]
    for events in decode_blocks(
        session.backend, rows, manifest.block, manifest.tokens.mask, setting.commit.cache_block
    ):
        now = perf_counter()
        for event in events:
            if event.token_ids:
                came[event.row].append(now)
    answers = []
    for (row, text), times in zip(made, came, strict=True):
        token_ids = row.tokens[row.stats.prompt_tokens :]
        if text is not None:
            text.finish()
        shown = text.text if text is not None else ""
        answers.append(
            Timeline.of(shown, token_ids, row.stats.forwards, row.finish_reason or "cancelled", asked, times)
        )
    return answers
