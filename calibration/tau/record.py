"""The record pass: one-token decoding that also records the predictions of every mask."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.decode.backend import Feed, StepOutput
from ...runtime.decode.config import GenerationConfig
from ...runtime.decode.pace.proposals import NONE
from ...runtime.decode.row import Accepted, Predictions, Row
from ...runtime.decode.schedule import Limits, Schedule, run
from ...runtime.session.session import Session
from ...runtime.structured.guide import SURE, Guide
from ...runtime.structured.guided_row import GuidedRow
from ..tasks.tasks import Task
from .decoding import Outcome

OUTPUTS = {"probability": "confidence", "margin": "margin", "entropy": "entropy"}
DIGITS = 6  # of a recorded confidence


@dataclass(frozen=True, slots=True)
class Trace:
    """One row decoded in one-token mode with full windows.

    predicted[s] are the tokens that step s predicted for positions s, s + 1, ... of the answer, and
    confidences[metric][s] their confidences. Steps near the limits predict fewer. `outcome` is the one-token
    answer; its cost includes the unused masks.

    With a grammar, the answer's positions `forced` took no step: step s predicts from the s-th of the other
    positions on. Tokens that the grammar would force replace predictions, with the highest confidence. A run
    ends where the grammar rejects it, or where a mask did not predict a forced token.
    """

    outcome: Outcome
    prompt_tokens: int
    predicted: tuple[tuple[int, ...], ...]
    confidences: dict[str, tuple[tuple[float, ...], ...]]
    forced: tuple[int, ...] = ()


class Recording:
    """The predictions of one row's masks, step by step."""

    def __init__(self) -> None:
        self.predicted: list[tuple[int, ...]] = []
        self.confidences: dict[str, list[tuple[float, ...]]] = {}
        self.starts: list[int] = []  # the first position of the answer that each step predicts
        self.forced: list[int] = []
        self.rejected: dict[int, int] = {}  # step: the first position whose prediction the grammar rejects

    def add(self, start: int, output: StepOutput, i: int, count: int) -> None:
        """Add `count` predictions of row `i` of `output`, from position `start` of the answer on."""
        self.starts.append(start)
        self.predicted.append(tuple(output.token_ids[i, :count].tolist()))
        for metric, name in OUTPUTS.items():
            values = getattr(output, name)
            if values is not None:
                rounded = tuple(round(v, DIGITS) for v in values[i, :count].tolist())
                self.confidences.setdefault(metric, []).append(rounded)

    def note_rejected(self, position: int, allowed: np.ndarray) -> None:
        """Compare earlier steps' predictions for a position with the tokens that the grammar allows there."""
        for step in range(len(self.starts) - 1, -1, -1):
            at = position - self.starts[step]
            if at >= len(self.predicted[step]):
                return
            if not allowed[self.predicted[step][at]]:
                self.rejected.setdefault(step, position)

    def follow(self, answer: Sequence[int]) -> None:
        """Replace the predictions by those under the grammar that led to `answer`."""
        runs = [self._run(step, answer) for step in range(len(self.starts))]
        for metric, steps in self.confidences.items():
            self.confidences[metric] = [
                tuple(SURE[metric] if at in sure else value for at, value in enumerate(values[: len(run)]))
                for values, (run, sure) in zip(steps, runs, strict=True)
            ]
        self.predicted = [tuple(run) for run, _ in runs]

    def _run(self, step: int, answer: Sequence[int]) -> tuple[list[int], set[int]]:
        """A step's predictions under the grammar: tokens, and the indices of forced ones."""
        first, forced = self.starts[step], frozenset(self.forced)
        end = min(self.rejected.get(step, len(answer)), len(answer))
        run: list[int] = [answer[first]]  # the best allowed token, even if another was predicted
        sure: set[int] = set()
        follows = answer[first] == self.predicted[step][0]
        for at, token in enumerate(self.predicted[step][1 : end - first], start=1):
            if not follows:
                break
            if first + at in forced:
                follows = token == answer[first + at]
                token = answer[first + at]
                sure.add(at)
            run.append(token)
        return run, sure

    def trace(self, row: Row, text: str, seconds: float) -> Trace:
        stats, answer = row.stats, tuple(row.tokens[row.stats.prompt_tokens :])
        reason = row.finish_reason or "cancelled"
        outcome = Outcome(text, answer, stats.forwards, stats.tokens, seconds, reason, stats.forced)
        if isinstance(row, GuidedRow):
            self.follow(answer)
        confidences = {metric: tuple(steps) for metric, steps in self.confidences.items()}
        return Trace(outcome, stats.prompt_tokens, tuple(self.predicted), confidences, tuple(self.forced))


def _most_masks(row: Row, block: int) -> int:
    """The masks of a full window in every step, although the row accepts one token."""
    return max(0, min(block - 1, row.remaining - 1))


class RecordingRow(Row):
    """A row in one-token mode that is fed full windows, and records the prediction of each mask."""

    def __init__(
        self, index: int, prompt: Sequence[int], config: GenerationConfig, eos_ids: Sequence[int]
    ) -> None:
        # tau 0 leads to full windows; `take` lets only the first prediction of each step be accepted.
        super().__init__(index, prompt, config.with_values(tau=0.0, window="full"), eos_ids)
        self.recording = Recording()

    most_masks = _most_masks

    def take(self, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        start = self.stats.tokens
        self.cursor += feed.pending
        self.stats.forwards += 1
        accepted = self.accept(Predictions.of(output, i, 1, "probability"))
        self.recording.add(start, output, i, feed.outputs)
        return accepted


class GuidedRecordingRow(GuidedRow):
    """The same for a row whose answer follows a grammar."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        guide: Guide,
    ) -> None:
        super().__init__(index, prompt, config.with_values(tau=0.0, window="full"), eos_ids, guide)
        self.recording = Recording()

    most_masks = _most_masks

    def begin(self, most: int) -> Accepted | None:
        begun = super().begin(most)
        self.recording.forced += begun.forced if begun is not None else ()
        return begun

    def take(self, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        start = self.stats.tokens
        self.cursor += feed.pending
        self.stats.forwards += 1
        self.recording.note_rejected(start, self.guide.allowed())
        accepted = self.accept(Predictions.of(output, i, 1, "probability"))
        self.proposals = NONE  # the grammar's proposals are not predictions of masks
        if accepted is None or not accepted.token_ids:
            return accepted  # the row has ended, or the next step predicts this position again with logits
        self.recording.forced += [start + at for at in accepted.forced]
        self.recording.add(start, output, i, feed.outputs)
        return accepted


def recorded_metrics(session: Session) -> tuple[str, ...]:
    """The confidence metrics that the running graph returns."""
    return tuple(metric for metric, name in OUTPUTS.items() if name in session.backend.outputs)


def record(session: Session, tasks: Sequence[Task], batch: int) -> Iterator[Trace]:
    """Decode the tasks, at most `batch` rows at a time, and yield their traces in order."""
    assert session.text is not None, "the caller has checked for a tokenizer"
    manifest = session.bundle.manifest
    rows: list[RecordingRow | GuidedRecordingRow] = []
    for i, task in enumerate(tasks):
        config = task.config(GenerationConfig())
        ids = task.prompt_ids or session.encode(task.prompt, tools=task.form.tools)
        if task.form:
            rows.append(GuidedRecordingRow(i, ids, config, manifest.tokens.eos, session.guide(config)))
        else:
            rows.append(RecordingRow(i, ids, config, manifest.tokens.eos))
    forwards = run(Schedule(session.backend, manifest.block, manifest.mask_id, Limits.of_rows(batch)), rows)
    start = time.perf_counter()
    for row in rows:
        while row.finish_reason is None:
            for event in next(forwards):
                if event.error is not None:
                    raise event.error
        end = time.perf_counter()
        text = session.text.decode(row.tokens[row.stats.prompt_tokens :])
        yield row.recording.trace(row, text, end - start)
        start = end
