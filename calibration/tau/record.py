"""The record pass: one-token decoding that keeps what every mask predicted all the same. Judges nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...runtime import GenerationConfig, Session
from ...runtime.decode.backend import StepOutput
from ...runtime.decode.feed import Feed
from ...runtime.decode.row import Accepted, Predictions, Row
from ...runtime.decode.schedule import Limits, Schedule, run
from ..tasks.tasks import Task
from .decoding import Outcome

OUTPUTS = {"probability": "confidence", "margin": "margin", "entropy": "entropy"}
DIGITS = 6  # of a recorded confidence


@dataclass(frozen=True, slots=True)
class Trace:
    """One row decoded in one-token mode with full windows.

    predicted[s] are the tokens that step s predicted for positions s, s + 1, ... of the answer;
    confidences[metric][s] belong to them. Steps near the limits predict fewer. `outcome` is the one-token
    answer, what it cost with the masks it did not use.
    """

    outcome: Outcome
    prompt_tokens: int
    predicted: tuple[tuple[int, ...], ...]
    confidences: dict[str, tuple[tuple[float, ...], ...]]


class RecordingRow(Row):
    """A row in one-token mode that is fed full windows all the same, and keeps what each mask predicted."""

    def __init__(
        self, index: int, prompt: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int]
    ) -> None:
        # tau 0 asks for full windows; `take` offers only the first prediction of each step for acceptance.
        super().__init__(
            index, prompt, GenerationConfig(tau=0.0, max_new_tokens=max_new_tokens, window="full"), eos_ids
        )
        self.predicted: list[tuple[int, ...]] = []
        self.recorded: dict[str, list[tuple[float, ...]]] = {}

    def take(self, output: StepOutput, i: int, feed: Feed) -> Accepted:
        count = feed.outputs
        self.predicted.append(tuple(output.token_ids[i, :count].tolist()))
        for metric, name in OUTPUTS.items():
            values = getattr(output, name)
            if values is not None:
                kept = tuple(round(v, DIGITS) for v in values[i, :count].tolist())
                self.recorded.setdefault(metric, []).append(kept)
        self.cursor += feed.known
        self.stats.forwards += 1
        return self.accept(Predictions.of(output, i, 1, "probability"))

    def trace(self, text: str, seconds: float) -> Trace:
        stats = self.stats
        answer = tuple(self.tokens[stats.prompt_tokens :])
        outcome = Outcome(
            text, answer, stats.forwards, stats.tokens, seconds, self.finish_reason or "cancelled"
        )
        confidences = {metric: tuple(steps) for metric, steps in self.recorded.items()}
        return Trace(outcome, stats.prompt_tokens, tuple(self.predicted), confidences)


def recorded_metrics(session: Session) -> tuple[str, ...]:
    """The confidence metrics that the running graph puts out."""
    return tuple(metric for metric, name in OUTPUTS.items() if name in session.backend.outputs)


def record(session: Session, tasks: Sequence[Task], batch: int) -> Iterator[Trace]:
    """Decode the tasks, at most `batch` rows at a time, a row that ends making room for the next; yields
    traces in their order."""
    assert session.text is not None, "the caller has made sure of a tokenizer"
    manifest = session.bundle.manifest
    rows = [
        RecordingRow(
            i, (task.prompt_ids or session.encode(task.prompt)), task.max_new_tokens, manifest.tokens.eos
        )
        for i, task in enumerate(tasks)
    ]
    forwards = run(
        Schedule(session.backend, manifest.block, manifest.tokens.mask, Limits.of_rows(batch)), rows
    )
    began = time.perf_counter()
    for row in rows:
        while row.finish_reason is None:
            for event in next(forwards):
                if event.error is not None:
                    raise event.error
        ended = time.perf_counter()
        yield row.trace(session.text.decode(row.tokens[row.stats.prompt_tokens :]), ended - began)
        began = ended
