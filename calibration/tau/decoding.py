"""Decodes task rows at one setting and keeps what each of them gave and cost. Judges and compares nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.answer import Completion
from ...runtime.session.session import Session
from ...runtime.text.prompts import Prompt
from ..tasks.scores import Output
from ..tasks.tasks import Task


class Generator(Protocol):
    """What decoding needs of a session."""

    def generate_each(
        self, prompts: Sequence[Prompt], config: Sequence[GenerationConfig], *, batch: int
    ) -> Iterator[Completion]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row decoded.

    With one row at a time `seconds` and `tokens_timed` leave out the prompt and its first step: the speed of
    decoding alone. In a batch rows start at different times: there `seconds` is the time since the row
    before, and only sums mean anything. `forced` of the tokens were given by the row's grammar.
    """

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    tokens_timed: int
    seconds: float
    finish_reason: str
    forced: int = 0

    @property
    def output(self) -> Output:
        return Output(self.text, self.token_ids)


def decode_rows(
    session: Generator, tasks: Sequence[Task], config: GenerationConfig, batch: int
) -> Iterator[Outcome]:
    """Decode the tasks, at most `batch` rows at a time, a row that ends making room for the next; yields
    outcomes in their order. The rows' own limits and forms replace those of `config`."""
    configs = [task.config(config) for task in tasks]
    began = time.perf_counter()
    for done in session.generate_each([task.prompt for task in tasks], configs, batch=batch):
        ended, stats = time.perf_counter(), done.stats
        alone = (stats.tokens_after_first, stats.decode_time)
        timed = alone if batch == 1 else (stats.tokens, ended - began)
        yield Outcome(done.text, done.token_ids, stats.forwards, *timed, done.finish_reason, stats.forced)
        began = ended


@dataclass(frozen=True, slots=True)
class Run:
    """What one forward added: its text, and how many tokens that was."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Example:
    """One row decoded at a setting, with the runs that were accepted together, for people to look at. `tau`
    is None in exact mode."""

    prompt: str
    tau: float | None
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


def decode_example(session: Session, task: Task, config: GenerationConfig) -> Example:
    """Decode a task step by step and keep the runs."""
    stream = session.stream(task.prompt, task.config(config))
    runs = tuple(Run(event.text, len(event.token_ids)) for event in stream if event.token_ids)
    return Example(task.shown, config.tau, runs)
