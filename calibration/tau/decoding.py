"""Decodes task rows at one setting, with the cost of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..tasks.scores import Output
from ..tasks.tasks import TaskRow


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row decoded.

    With one row at a time, `seconds` and `tokens_timed` exclude the prompt and its first step: they give the
    speed of decoding alone. In a batch, rows start at different times: `seconds` is the time since the
    previous row, and only sums are meaningful. The row's grammar forced `forced` of the tokens; `refused` is
    as in Stats.
    """

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    tokens_timed: int
    seconds: float
    finish_reason: str
    forced: int = 0
    refused: float | None = None

    @property
    def output(self) -> Output:
        return Output(self.text, self.token_ids)

    def holds_at(self, config: GenerationConfig) -> bool:
        """Whether an outcome at a safer tau is that of `config` too, step by step: no prediction was refused
        that `config` accepts. Not for rows with a grammar."""
        return self.refused is None or not config.passes(self.refused)


def decode_rows(
    session: Session, tasks: Sequence[TaskRow], config: GenerationConfig, batch: int
) -> Iterator[Outcome]:
    """Decode the tasks, at most `batch` rows at a time, and yield their outcomes in order. The rows' limits
    and forms replace those of `config`."""
    configs = [task.config(config) for task in tasks]
    start = time.perf_counter()
    for row in session.generate_each([task.prompt for task in tasks], configs, batch=batch):
        end, stats = time.perf_counter(), row.stats
        alone = (stats.tokens_after_first, stats.decode_time)
        timed = alone if batch == 1 else (stats.tokens, end - start)
        yield Outcome(
            row.text, row.token_ids, stats.forwards, *timed, row.finish_reason, stats.forced, stats.refused
        )
        start = end


def num_same(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> int:
    """The number of rows with the same tokens, among the first."""
    return sum(o.token_ids == r.token_ids for o, r in zip(outcomes, references, strict=False))
