"""What an answer asks of a replica in a mode: its prompt, and how far each of its steps would get. Knows no
time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...runtime.accept import accept, is_one_token
from ...runtime.errors import CalibrationError
from ..tau.record import Trace


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode: exact, or by a tau; `name` is for people."""

    name: str
    exact: bool
    tau: float = 1.0
    metric: str = "probability"

    @property
    def one_token(self) -> bool:
        return not self.exact and is_one_token(self.tau, self.metric)


@dataclass(frozen=True, slots=True)
class Work:
    """An answer in a mode. `reach[a]`: of a step behind `a` tokens of the answer, how many tokens stand
    together at most, by tau; in exact mode, how many of what it predicts are the one-token answer.

    `limit` is the most tokens that the request allows. The answer has len(reach) tokens, or ends where a tau
    accepts an end of its own: behind all that stand together from one of the places `ends`.
    """

    prompt_tokens: int
    reach: tuple[int, ...]
    limit: int
    ends: frozenset[int] = frozenset()


def work_of(trace: Trace, mode: Mode, eos_ids: Collection[int], limit: int) -> Work:
    """A recorded answer as work. Where a tau leaves the one-token answer, what follows is taken to be like
    the recorded answer (tau/replay.py). Raises CalibrationError for a metric that was not recorded."""
    answer = trace.outcome.token_ids
    if mode.exact:
        steps = enumerate(trace.predicted[: len(answer)])
        return Work(trace.prompt_tokens, tuple(_same(step, answer[s:]) for s, step in steps), limit)
    if mode.metric not in trace.confidences:
        raise CalibrationError(
            f"{mode.name}: the bundle does not put out {mode.metric}; export it with --metrics, or leave this"
            " mode out with --modes"
        )
    sure = trace.confidences[mode.metric]
    reach = tuple(
        accept(trace.predicted[a], sure[a], mode.tau, mode.metric, eos_ids, limit - a)
        for a in range(len(answer))
    )
    ends = frozenset(a for a, count in enumerate(reach) if trace.predicted[a][count - 1] in eos_ids)
    return Work(trace.prompt_tokens, reach, limit, ends)


def _same(predicted: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens that two sequences begin with in common."""
    pairs = zip(predicted, answer, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(predicted), len(answer)))
