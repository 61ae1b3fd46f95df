"""What a tau would cost and keep, told from the record pass alone: no model runs here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from ...runtime.accept import accept
from .record import Trace


@dataclass(frozen=True, slots=True)
class Walk:
    """One row walked at a tau. `agrees`: it never left the one-token answer, nor would a real decode."""

    tokens: int
    forwards: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """All rows walked at a tau. `agreement` is the share of rows that never leave the one-token answer."""

    metric: str
    tau: float
    tokens_per_forward: float
    agreement: float


def walk(trace: Trace, metric: str, tau: float, eos_ids: Collection[int], limit: int) -> Walk:
    """Walk a recorded row as a decode at `tau` would: at each cursor take what the rule accepts, then jump
    past it.

    Up to the first accepted token that one-token decoding did not choose, this is exactly what a real decode
    does. After it the real answer is another one; its confidences are taken to be like those of the recorded
    answer. Under a grammar a decode is faster than is told here: its masks stand behind what is forced.
    """
    answer = trace.outcome.token_ids
    confidences = trace.confidences[metric] if trace.predicted else ()
    steps, at, forwards, agrees = _steps(trace), 0, 0, True
    while at < len(answer):
        step = steps[at]
        if step is None:
            at += 1
            continue
        predicted = trace.predicted[step]
        num = accept(predicted, confidences[step], tau, metric, eos_ids, limit - at)
        agrees = agrees and predicted[:num] == answer[at : at + num]
        forwards += 1
        at += num
        if predicted[num - 1] in eos_ids:
            break
    # Accepted tokens past the end of the recorded answer count as far as the limit: a real decode would have
    # them too.
    return Walk(at, forwards, agrees)


def _steps(trace: Trace) -> list[int | None]:
    """The step that predicts from each position of the answer on; None where the grammar needs none."""
    forced, number = frozenset(trace.forced), count()
    return [None if at in forced else next(number) for at in range(len(trace.outcome.token_ids))]


def predict(
    traces: Sequence[Trace], limits: Sequence[int], metric: str, tau: float, eos_ids: Collection[int]
) -> Prediction:
    """Tokens per forward and agreement of all rows at a tau. `limits` are the rows' max_new_tokens."""
    walks = [walk(trace, metric, tau, eos_ids, limit) for trace, limit in zip(traces, limits, strict=True)]
    tokens, forwards = sum(w.tokens for w in walks), sum(w.forwards for w in walks)
    agreement = sum(w.agrees for w in walks) / len(walks)
    return Prediction(metric, tau, tokens / forwards if forwards else 0.0, agreement)
