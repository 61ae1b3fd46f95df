"""Decodes task rows at one setting, with the cost of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ...runtime.text.stream import TextStream
from ...runtime.text.tokenizer import Text
from ..tasks.scores import Output
from ..tasks.tasks import TaskRow


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row decoded. Its grammar forced `forced` of the tokens; `steps` are those of Stats."""

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    finish_reason: str
    forced: int = 0
    steps: tuple[tuple[int, float | None], ...] = ()

    @property
    def output(self) -> Output:
        return Output(self.text, self.token_ids)

    def num_shared(self, config: GenerationConfig) -> int:
        """The number of leading steps that `config` shares with a safer tau: up to a step that ended at a
        prediction which `config` accepts. Not for rows with a grammar."""
        ends = (i for i, (_, end) in enumerate(self.steps) if end is not None and config.passes(end))
        return next(ends, len(self.steps))


NOTHING = Outcome("", (), 0, "")
MAX_DRAFT = 128  # tokens verified in one step, which has the logits of all


def decode_rows(
    session: Session,
    tasks: Sequence[TaskRow],
    config: GenerationConfig,
    batch: int,
    safer: Sequence[Outcome] = (),
) -> Iterator[Outcome]:
    """Decode the tasks, at most `batch` rows at a time, and yield their outcomes in order. The rows' limits
    and forms replace those of `config`.

    With the outcomes at a `safer` tau, exact mode verifies their answers in its first step, and a tau begins
    after the steps that it shares with them. Only where predictions do not depend on the width of a step.
    """
    prompts, configs, begun = [], [], []
    for task, known in zip(tasks, safer or [NOTHING] * len(tasks), strict=True):
        steps = known.steps[: 0 if config.exact else known.num_shared(config)]
        ids = known.token_ids[: sum(count for count, _ in steps)]
        prompts.append((*(task.prompt_ids or ()), *ids) if ids else task.prompt)
        configs.append(replace(task, max_new_tokens=task.max_new_tokens - len(ids)).config(config))
        begun.append((steps, ids))
    drafts = [known.token_ids[:MAX_DRAFT] for known in safer] if config.exact else ()
    answers = session.generate_each(prompts, configs, batch=batch, drafts=drafts)
    for (steps, ids), rest in zip(begun, answers, strict=True):
        stats, text, token_ids = rest.stats, rest.text, (*ids, *rest.token_ids)
        if ids and session.text:
            text = text_of(session.text, token_ids[: -1 if rest.finish_reason == "eos" else None])
        forwards, steps = len(steps) + stats.forwards, (*steps, *stats.steps)
        yield Outcome(text, token_ids, forwards, rest.finish_reason, stats.forced, steps)


def text_of(text: Text, token_ids: Sequence[int]) -> str:
    """The text of a whole answer, without an end-of-sequence token."""
    stream = TextStream(text)
    for token in token_ids:
        stream.push(token)
    return stream.finish()


def num_same(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> int:
    """The number of rows with the same tokens, among the first."""
    return sum(o.token_ids == r.token_ids for o, r in zip(outcomes, references, strict=False))


def row_seconds(
    session: Session, config: GenerationConfig, batch: int, prompt: float, steps: Sequence[float]
) -> float:
    """Predicted seconds of a row with all masks, `batch` rows at once. `steps`: their tokens, which the next
    one feeds."""
    cost, masks = session.cost, 0 if config.one_token else session.bundle.manifest.block - 1
    later = sum(cost.of(batch * (tokens + masks)) for tokens in steps[:-1])
    return cost.of(prompt + masks) + later / batch


class Clock:
    """The rows of planned phases, in their order. `seconds`: a first guess of a row's time."""

    def __init__(self, planned: Mapping[str, int], seconds: float) -> None:
        self._planned, self._left = planned, dict(planned)
        self._phase, self._start = "", time.monotonic()
        self._seconds, self._done = seconds, 1

    def at(self, phase: str, done: int, total: int) -> None:
        """Note the rows done of a phase. Nothing else is left in the last one."""
        left = max(total, self._planned.get(phase, 0)) - done
        if phase == self._phase:  # rows that are known when it begins take no time
            self._done += max(0, self._left[phase] - left)
        if phase in [*self._planned][-1:]:
            self._left = {}
        self._phase, self._left[phase] = phase, left

    def __str__(self) -> str:
        """The most time left."""
        seconds = sum(self._left.values()) * (self._seconds + time.monotonic() - self._start) / self._done
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
