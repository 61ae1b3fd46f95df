"""The record pass: one-token decoding that keeps what every mask predicted all the same. Judges nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...runtime import GenerationConfig, Session
from ...runtime.decode.backend import StepOutput
from ...runtime.decode.batch import Batch, Window, fits, window_of
from ...runtime.decode.row import Predictions, Row
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


class Recorder:
    """A row in one-token mode, and all predictions of its steps."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.predicted: list[tuple[int, ...]] = []
        self.confidences: dict[str, list[tuple[float, ...]]] = {}

    def take(self, output: StepOutput, i: int, window: Window) -> None:
        """Keep everything that batch row `i` of a step predicted, and accept the first."""
        count = window.masks + 1
        self.predicted.append(tuple(output.token_ids[i, :count].tolist()))
        for metric, name in OUTPUTS.items():
            if (values := getattr(output, name)) is not None:
                shown = tuple(round(v, DIGITS) for v in values[i, :count].tolist())
                self.confidences.setdefault(metric, []).append(shown)
        self.row.cursor += window.known
        self.row.stats.forwards += 1
        self.row.take(Predictions.of(output, i, 1, "probability"))

    def trace(self, session: Session, seconds: float) -> Trace:
        stats, reason = self.row.stats, self.row.finish_reason or "cancelled"
        ids = tuple(self.row.tokens[stats.prompt_tokens :])
        assert session.text is not None, "the plan has made sure of a tokenizer"
        outcome = Outcome(session.text.decode(ids), ids, stats.forwards, stats.tokens, seconds, reason)
        confidences = {metric: tuple(steps) for metric, steps in self.confidences.items()}
        return Trace(outcome, stats.prompt_tokens, tuple(self.predicted), confidences)


def recorded_metrics(session: Session) -> tuple[str, ...]:
    """The confidence metrics that the running graph puts out."""
    return tuple(metric for metric, name in OUTPUTS.items() if name in session.backend.outputs)


def record(session: Session, tasks: Sequence[Task], batch: int) -> Iterator[Trace]:
    """Decode the tasks in their order, `batch` rows at a time; yields the traces of a batch as it ends."""
    for start in range(0, len(tasks), batch):
        yield from _record_batch(session, tasks[start : start + batch])


def _record_batch(session: Session, tasks: Sequence[Task]) -> list[Trace]:
    manifest, began = session.bundle.manifest, time.perf_counter()
    # tau 0 asks for full windows; only the first prediction of each step is offered: that is one-token mode.
    recorders = [
        Recorder(
            Row(
                i,
                session.encode(task.prompt),
                GenerationConfig(tau=0.0, max_new_tokens=task.max_new_tokens),
                manifest.tokens.eos,
            )
        )
        for i, task in enumerate(tasks)
    ]
    batch = Batch(session.backend, len(recorders), manifest.tokens.mask)
    for recorder in recorders:
        batch.active.append(recorder.row)
        for _ in batch.prefill(recorder.row):
            pass
    while batch.active:
        for row in batch.active:
            if not fits(batch, row):
                row.finish("capacity")
        batch.drop_finished()
        if rows := list(batch.active):
            windows = [window_of(batch, row, manifest.block) for row in rows]
            output = batch.forward(0, windows)
            for i, (row, window) in enumerate(zip(rows, windows, strict=True)):
                recorders[row.index].take(output, i, window)
        batch.drop_finished()
    share = (time.perf_counter() - began) / len(recorders)
    return [recorder.trace(session, share) for recorder in recorders]
