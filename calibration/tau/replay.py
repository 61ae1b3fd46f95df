"""Predicts the speed and the agreement of a tau from the record pass, without running the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from ...runtime.accept import accept
from .record import Trace


@dataclass(frozen=True, slots=True)
class RowReplay:
    """One row replayed at a tau. `agrees`: it never left the one-token answer, nor would a real decode."""

    tokens: int
    forwards: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """All rows replayed at a tau. `agreement` is the share of rows that never leave the one-token answer."""

    metric: str
    tau: float
    tokens_per_forward: float
    agreement: float


def replay(trace: Trace, metric: str, tau: float, eos_ids: Collection[int], limit: int) -> RowReplay:
    """Replay a recorded row at `tau`: at each cursor take the accepted tokens, then continue after them.

    Up to the first accepted token that one-token decoding did not choose, this is exactly what a real decode
    does. After it the real answer differs, and its confidences are assumed to be like those of the recorded
    answer. With a grammar a real decode is faster, because its masks come after forced tokens.
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
    # Accepted tokens after the end of the recorded answer count up to the limit, as in a real decode.
    return RowReplay(at, forwards, agrees)


def _steps(trace: Trace) -> list[int | None]:
    """The step that predicts from each position of the answer on; None for forced positions."""
    forced, number = frozenset(trace.forced), count()
    return [None if at in forced else next(number) for at in range(len(trace.outcome.token_ids))]


def predict(
    traces: Sequence[Trace], limits: Sequence[int], metric: str, tau: float, eos_ids: Collection[int]
) -> Prediction:
    """Tokens per forward and agreement of all rows at a tau. `limits` are the rows' max_new_tokens."""
    rows = [replay(trace, metric, tau, eos_ids, limit) for trace, limit in zip(traces, limits, strict=True)]
    tokens, forwards = sum(r.tokens for r in rows), sum(r.forwards for r in rows)
    agreement = sum(r.agrees for r in rows) / len(rows)
    return Prediction(metric, tau, tokens / forwards if forwards else 0.0, agreement)
