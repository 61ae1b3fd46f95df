"""The record pass: one-token decoding that keeps what every mask predicted all the same. Judges nothing."""

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

    predicted[s] are the tokens that step s predicted for positions s, s + 1, ... of the answer;
    confidences[metric][s] belong to them. Steps near the limits predict fewer. `outcome` is the one-token
    answer, what it cost with the masks it did not use.

    Under a grammar the answer's positions `forced` took no step: step s predicts from the s-th of the others
    on. What the grammar would force within is there in place of what the mask said, as sure as can be, and a
    run ends where the grammar refuses it, or where the mask did not foresee what is forced.
    """

    outcome: Outcome
    prompt_tokens: int
    predicted: tuple[tuple[int, ...], ...]
    confidences: dict[str, tuple[tuple[float, ...], ...]]
    forced: tuple[int, ...] = ()


class Recording:
    """What one row's masks predicted, step by step."""

    def __init__(self) -> None:
        self.predicted: list[tuple[int, ...]] = []
        self.confidences: dict[str, list[tuple[float, ...]]] = {}
        self.places: list[int] = []  # of the answer, from which each step predicts
        self.forced: list[int] = []
        self.refused: dict[int, int] = {}  # step: the first place where the grammar allows something else

    def add(self, place: int, output: StepOutput, i: int, count: int) -> None:
        """Add `count` predictions of row `i` of `output`, which start at `place` of the answer."""
        self.places.append(place)
        self.predicted.append(tuple(output.token_ids[i, :count].tolist()))
        for metric, name in OUTPUTS.items():
            values = getattr(output, name)
            if values is not None:
                rounded = tuple(round(v, DIGITS) for v in values[i, :count].tolist())
                self.confidences.setdefault(metric, []).append(rounded)

    def see_refused(self, place: int, allowed: np.ndarray) -> None:
        """Compare what earlier steps predicted for a place with what the grammar allows there."""
        for step in range(len(self.places) - 1, -1, -1):
            at = place - self.places[step]
            if at >= len(self.predicted[step]):
                return
            if not allowed[self.predicted[step][at]]:
                self.refused.setdefault(step, place)

    def follow(self, answer: Sequence[int]) -> None:
        """Replace the predictions by what they come to under the grammar that wrote `answer`."""
        runs = [self._run(step, answer) for step in range(len(self.places))]
        for metric, steps in self.confidences.items():
            self.confidences[metric] = [
                tuple(SURE[metric] if at in sure else value for at, value in enumerate(values[: len(run)]))
                for values, (run, sure) in zip(steps, runs, strict=True)
            ]
        self.predicted = [tuple(run) for run, _ in runs]

    def _run(self, step: int, answer: Sequence[int]) -> tuple[list[int], set[int]]:
        """A step's predictions under the grammar: tokens, and which of them are forced."""
        first, forced = self.places[step], frozenset(self.forced)
        end = min(self.refused.get(step, len(answer)), len(answer))
        run: list[int] = [answer[first]]  # the best allowed token, whatever was predicted
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
    """A full window in every step, although the row accepts one token."""
    return max(0, min(block - 1, row.remaining - 1))


class RecordingRow(Row):
    """A row in one-token mode that is fed full windows, and records what each mask predicted."""

    def __init__(
        self, index: int, prompt: Sequence[int], config: GenerationConfig, eos_ids: Sequence[int]
    ) -> None:
        # tau 0 asks for full windows; `take` offers only the first prediction of each step for acceptance.
        super().__init__(index, prompt, config.with_values(tau=0.0, window="full"), eos_ids)
        self.recording = Recording()

    most_masks = _most_masks

    def take(self, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        place = self.stats.tokens
        self.cursor += feed.known
        self.stats.forwards += 1
        accepted = self.accept(Predictions.of(output, i, 1, "probability"))
        self.recording.add(place, output, i, feed.outputs)
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
        place = self.stats.tokens
        self.cursor += feed.known
        self.stats.forwards += 1
        self.recording.see_refused(place, self.guide.allowed())
        accepted = self.accept(Predictions.of(output, i, 1, "probability"))
        self.proposals = NONE  # what a grammar makes likely is no prediction
        if accepted is None or not accepted.token_ids:
            return accepted  # the same place is asked for again, with logits, or there is none
        self.recording.forced += [place + at for at in accepted.forced]
        self.recording.add(place, output, i, feed.outputs)
        return accepted


def recorded_metrics(session: Session) -> tuple[str, ...]:
    """The confidence metrics that the running graph puts out."""
    return tuple(metric for metric, name in OUTPUTS.items() if name in session.backend.outputs)


def record(session: Session, tasks: Sequence[Task], batch: int) -> Iterator[Trace]:
    """Decode the tasks, at most `batch` rows at a time, a row that ends making room for the next; yields
    traces in their order."""
    assert session.text is not None, "the caller has made sure of a tokenizer"
    manifest = session.bundle.manifest
    rows: list[RecordingRow | GuidedRecordingRow] = []
    for i, task in enumerate(tasks):
        config = task.config(GenerationConfig())
        ids = task.prompt_ids or session.encode(task.prompt, tools=task.form.tools)
        if task.form:
            rows.append(GuidedRecordingRow(i, ids, config, manifest.tokens.eos, session.guide(config)))
        else:
            rows.append(RecordingRow(i, ids, config, manifest.tokens.eos))
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
        text = session.text.decode(row.tokens[row.stats.prompt_tokens :])
        yield row.recording.trace(row, text, ended - began)
        began = ended
