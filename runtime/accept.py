"""The two acceptance rules of MARS: by confidence, and by verification. The C++ runtime has the same rules,
and the files in tests/conformance test both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

METRICS = ("probability", "margin", "entropy")


def is_one_token(tau: float, metric: str) -> bool:
    """Whether `tau` means one token a step, so that no masks are needed: tau >= 1, for entropy tau <= 0.

    Comparing confidences is not enough: a confident probability rounds to exactly 1.0 (paper: tau = 1.0 is
    ordinary one-token decoding).
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
    """The number of predictions to accept, from the left: the first, then each whose confidence passes `tau`.

    Nothing after an end-of-sequence token, and at most `limit`. `token_ids` and `confidences` have equal
    length, in position order.
    """
    limit = min(limit, 1) if is_one_token(tau, metric) else limit
    return _run_length(token_ids, eos_ids, limit, lambda i: passes(confidences[i], tau, metric))


def verify(
    token_ids: Sequence[int], draft_tokens: Sequence[int], eos_ids: Collection[int], limit: int
) -> int:
    """The number of the model's own next tokens to accept, from the left: the first, then each one whose
    preceding draft token was right.

    `token_ids[j]` is what the model predicts after `draft_tokens[:j]`. Nothing after an end-of-sequence
    token, and at most `limit`. So the accepted tokens are those of one-token decoding, whatever was proposed.
    """
    limit = min(limit, len(draft_tokens) + 1)
    return _run_length(token_ids, eos_ids, limit, lambda i: token_ids[i - 1] == draft_tokens[i - 1])


def _run_length(
    token_ids: Sequence[int], eos_ids: Collection[int], limit: int, may_follow: Callable[[int], bool]
) -> int:
    """Tokens of the accepted run. It reads no token after the last that it needs: drawing one takes time."""
    count = 0
    while count < min(limit, len(token_ids)) and (
        count == 0 or (may_follow(count) and token_ids[count - 1] not in eos_ids)
    ):
        count += 1
    return count
