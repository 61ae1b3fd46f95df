"""The record pass: one-token decoding that keeps what every mask predicted all the same. Judges nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime import GenerationConfig, Session
from ...runtime.decode.backend import StepOutput
from ...runtime.decode.feed import Feed
from ...runtime.decode.guide import SURE, Guide
from ...runtime.decode.proposals import NONE
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

    Under a grammar the answer's positions `forced` took no step: step s predicts from the s-th of the others
    on. What the grammar would force within is there in place of what the mask said, as sure as can be, and a
    run ends where the grammar refuses it, or where the mask did not foresee what is forced.
    """

    outcome: Outcome
    prompt_tokens: int
    predicted: tuple[tuple[int, ...], ...]
    confidences: dict[str, tuple[tuple[float, ...], ...]]
    forced: tuple[int, ...] = ()


class RecordingRow(Row):
    """A row in one-token mode that is fed full windows all the same, and keeps what each mask predicted."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        guide: Guide | None = None,
    ) -> None:
        # tau 0 asks for full windows; `take` offers only the first prediction of each step for acceptance.
        super().__init__(index, prompt, config.with_values(tau=0.0, window="full"), eos_ids, guide=guide)
        self.predicted: list[tuple[int, ...]] = []
        self.recorded: dict[str, list[tuple[float, ...]]] = {}
        self.places: list[int] = []  # of the answer, from which each step predicts
        self.forced: list[int] = []
        self.refused: dict[int, int] = {}  # step: the first place where the grammar allows something else

    def most_masks(self, block: int) -> int:
        return max(0, min(block - 1, self.remaining - 1))

    def begin(self, most: int) -> Accepted | None:
        begun = super().begin(most)
        self.forced += begun.forced if begun is not None else ()
        return begun

    def take(self, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        place = self.stats.tokens
        self.cursor += feed.known
        self.stats.forwards += 1
        predictions = Predictions.of(output, i, 1, "probability")
        if self.guide is None:
            accepted: Accepted | None = self.accept(predictions)
        else:
            self._see_refused(place, self.guide.allowed())
            accepted = self.follow(self.guide, predictions, 0)
            self.proposals = NONE  # what a grammar makes likely is no prediction
            if accepted is None or not accepted.token_ids:
                return accepted  # the same place is asked for again, with logits, or is none
            self.forced += [place + at for at in accepted.forced]
        self.places.append(place)
        count = feed.outputs
        self.predicted.append(tuple(output.token_ids[i, :count].tolist()))
        for metric, name in OUTPUTS.items():
            values = getattr(output, name)
            if values is not None:
                kept = tuple(round(v, DIGITS) for v in values[i, :count].tolist())
                self.recorded.setdefault(metric, []).append(kept)
        return accepted

    def _see_refused(self, place: int, allowed: np.ndarray) -> None:
        """What earlier steps predicted for a place, now that it is known what the grammar allows there."""
        for step in range(len(self.places) - 1, -1, -1):
            at = place - self.places[step]
            if at >= len(self.predicted[step]):
                return
            if not allowed[self.predicted[step][at]]:
                self.refused.setdefault(step, place)

    def _run(self, step: int) -> tuple[list[int], dict[int, int]]:
        """What a step's predictions come to under the grammar: tokens, and which of them are forced."""
        answer, first = self.tokens[self.stats.prompt_tokens :], self.places[step]
        end, forced = min(self.refused.get(step, len(answer)), len(answer)), frozenset(self.forced)
        run: list[int] = [answer[first]]  # the best allowed token, whatever was predicted
        sure: dict[int, int] = {}
        follows = answer[first] == self.predicted[step][0]
        for at, token in enumerate(self.predicted[step][1 : end - first], start=1):
            if not follows:
                break
            if first + at in forced:
                follows, sure[at] = token == answer[first + at], answer[first + at]
                token = answer[first + at]
            run.append(token)
        return run, sure

    def _followed(self) -> tuple[tuple[tuple[int, ...], ...], dict[str, tuple[tuple[float, ...], ...]]]:
        runs = [self._run(step) for step in range(len(self.places))]
        confidences = {
            metric: tuple(
                tuple(SURE[metric] if at in sure else value for at, value in enumerate(values[: len(run)]))
                for values, (run, sure) in zip(steps, runs, strict=True)
            )
            for metric, steps in self.recorded.items()
        }
        return tuple(tuple(run) for run, _ in runs), confidences

    def trace(self, text: str, seconds: float) -> Trace:
        stats = self.stats
        answer = tuple(self.tokens[stats.prompt_tokens :])
        outcome = Outcome(
            text,
            answer,
            stats.forwards,
            stats.tokens,
            seconds,
            self.finish_reason or "cancelled",
            stats.forced,
        )
        predicted = tuple(self.predicted)
        confidences = {metric: tuple(steps) for metric, steps in self.recorded.items()}
        if self.guide is not None:
            predicted, confidences = self._followed()
        return Trace(outcome, stats.prompt_tokens, predicted, confidences, tuple(self.forced))


def recorded_metrics(session: Session) -> tuple[str, ...]:
    """The confidence metrics that the running graph puts out."""
    return tuple(metric for metric, name in OUTPUTS.items() if name in session.backend.outputs)


def record(session: Session, tasks: Sequence[Task], batch: int) -> Iterator[Trace]:
    """Decode the tasks, at most `batch` rows at a time, a row that ends making room for the next; yields
    traces in their order."""
    assert session.text is not None, "the caller has made sure of a tokenizer"
    manifest = session.bundle.manifest
    rows = []
    for i, task in enumerate(tasks):
        config = task.config(GenerationConfig())
        ids = task.prompt_ids or session.encode(task.prompt, tools=task.form.tools)
        guide = session.guide(config) if task.form else None
        rows.append(RecordingRow(i, ids, config, manifest.tokens.eos, guide))
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
