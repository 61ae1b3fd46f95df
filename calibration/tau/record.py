"""The record pass: one-token decoding that feeds the masks all the same and keeps what each of them predicted. Judges nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...runtime import GenerationConfig, Session
from ...runtime.decode.backend import StepOutput
from ...runtime.decode.batch import Batch, fits, window_of
from ...runtime.decode.row import Predictions, Row
from ..tasks.tasks import Task
from .decoding import Outcome

OUTPUTS = {"probability": "confidence", "margin": "margin", "entropy": "entropy"}
DIGITS = 6  # of a kept confidence


@dataclass(frozen=True, slots=True)
class Trace:
    """One row decoded in one-token mode with full windows.

    predicted[s] are the tokens that step s predicted for positions s, s + 1, ... of the answer; confidences[metric][s] belong to
    them. Steps near the limits predict fewer. `outcome` is the one-token answer, what it cost with the masks it did not use.
    """

    outcome: Outcome
    prompt_tokens: int
    predicted: tuple[tuple[int, ...], ...]
    confidences: dict[str, tuple[tuple[float, ...], ...]]

    def to_dict(self) -> dict[str, Any]:
        values = {
            "outcome": self.outcome.to_dict(),
            "prompt_tokens": self.prompt_tokens,
            "predicted": self.predicted,
        }
        return values | {"confidences": self.confidences}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trace:
        confidences = {metric: tuple(map(tuple, steps)) for metric, steps in values["confidences"].items()}
        return cls(
            Outcome.from_dict(values["outcome"]),
            values["prompt_tokens"],
            tuple(map(tuple, values["predicted"])),
            confidences,
        )


@dataclass(slots=True)
class _Recorder:
    """What is kept of one row while it runs."""

    row: Row
    predicted: list[tuple[int, ...]] = field(default_factory=list)
    confidences: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    def keep(self, output: StepOutput, i: int, count: int) -> None:
        self.predicted.append(tuple(output.token_ids[i, :count].tolist()))
        for metric, name in OUTPUTS.items():
            values = getattr(output, name)
            if values is not None:
                self.confidences.setdefault(metric, []).append(
                    tuple(round(v, DIGITS) for v in values[i, :count].tolist())
                )

    def trace(self, text: str, seconds: float) -> Trace:
        row = self.row
        outcome = Outcome(
            text,
            tuple(row.tokens[row.stats.prompt_tokens :]),
            row.stats.forwards,
            row.stats.tokens,
            seconds,
            row.finish_reason or "cancelled",
        )
        return Trace(
            outcome,
            row.stats.prompt_tokens,
            tuple(self.predicted),
            {m: tuple(v) for m, v in self.confidences.items()},
        )


def recorded_metrics(session: Session) -> tuple[str, ...]:
    """The confidence metrics that the running graph puts out."""
    return tuple(metric for metric, name in OUTPUTS.items() if name in session.backend.outputs)


def record(session: Session, tasks: Sequence[Task], batch: int) -> Iterator[Trace]:
    """Decode the tasks in their order, `batch` rows at a time; yields the traces of a batch as it ends."""
    for start in range(0, len(tasks), batch):
        yield from _record_batch(session, tasks[start : start + batch])


def _record_batch(session: Session, tasks: Sequence[Task]) -> list[Trace]:
    manifest = session.bundle.manifest
    # tau 0 asks for full windows; only the first prediction of each step is offered for acceptance, which is one-token mode.
    configs = [GenerationConfig(tau=0.0, max_new_tokens=task.max_new_tokens) for task in tasks]
    kept = [
        _Recorder(Row(i, session.encode(task.prompt), c, manifest.tokens.eos))
        for i, (task, c) in enumerate(zip(tasks, configs, strict=True))
    ]
    batch = Batch(session.backend, len(kept), manifest.tokens.mask)
    began = time.perf_counter()
    for recorder in kept:
        batch.active.append(recorder.row)
        for _ in batch.prefill(recorder.row):
            pass
    while batch.active:
        for row in batch.active:
            if not fits(batch, row):
                row.finish("capacity")
        batch.drop_finished()
        if batch.active:
            _step(batch, kept, manifest.block)
        batch.drop_finished()
    share = (time.perf_counter() - began) / len(kept)
    assert session.text is not None, "the caller has made sure of a tokenizer"
    return [
        recorder.trace(session.text.decode(recorder.row.tokens[recorder.row.stats.prompt_tokens :]), share)
        for recorder in kept
    ]


def _step(batch: Batch, kept: Sequence[_Recorder], block: int) -> None:
    windows = [window_of(batch, row, block) for row in batch.active]
    output = batch.forward(0, windows)
    for i, (row, window) in enumerate(zip(batch.active, windows, strict=True)):
        row.cursor += window.known
        row.stats.forwards += 1
        kept[row.index].keep(output, i, window.masks + 1)
        row.take(Predictions.of(output, i, 1, "probability"))
