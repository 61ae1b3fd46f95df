"""The acceptance rule of MARS, left to right. Ten lines that decide; tests/conformance holds them and their
C++ twin together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

METRICS = ("probability", "margin", "entropy")


def is_one_token(tau: float, metric: str) -> bool:
    """Whether `tau` means exactly one token a step, so that no masks are needed: tau >= 1, for entropy tau <=
    0.

    A rule of its own, because in floating point a confident probability rounds to exactly 1.0 (paper: tau =
    1.0 is ordinary one-token decoding).
    """
    return tau <= 0.0 if metric == "entropy" else tau >= 1.0


def passes(confidence: float, tau: float, metric: str) -> bool:
    """Probability or margin >= tau; entropy (nats) <= tau. NaN never passes."""
    return confidence <= tau if metric == "entropy" else confidence >= tau


def accept(
    token_ids: Sequence[int],
    confidences: Sequence[float],
    tau: float,
    metric: str,
    eos_ids: Collection[int],
    limit: int,
) -> int:
    """How many of the predictions to accept, from the left: 0 only if there are none or `limit` is 0.

    The first always; then each next one while its confidence passes `tau`; none after an end-of-sequence
    token; at most `limit`. `token_ids` and `confidences` have equal length, in position order.
    """
    most = min(limit, len(token_ids), 1 if is_one_token(tau, metric) else len(token_ids))
    count = 0
    while count < most and (
        count == 0 or (passes(confidences[count], tau, metric) and token_ids[count - 1] not in eos_ids)
    ):
        count += 1
    return count


def verify(token_ids: Sequence[int], proposals: Sequence[int], eos_ids: Collection[int], limit: int) -> int:
    """How many of the model's own next tokens stand, from the left: 0 only if there are none or `limit` is 0.

    `token_ids[j]` is what the model itself says, one token at a time, behind `proposals[:j]`. The first
    always stands; each next one while the proposal before it was that very token; none after an
    end-of-sequence token; at most `limit`. So what stands is the one-token answer, whatever was proposed.
    """
    most = min(limit, len(token_ids), len(proposals) + 1)
    count = 0
    while count < most and (
        count == 0 or (token_ids[count - 1] == proposals[count - 1] and token_ids[count - 1] not in eos_ids)
    ):
        count += 1
    return count
