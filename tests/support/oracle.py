"""The slow, obvious MARS sampler, written from the method and from nothing of ours: a full forward over
prefix + masks, each step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Prediction:
    token: int
    probability: float
    margin: float
    entropy: float  # nats


@dataclass(slots=True)
class Answer:
    """What the oracle generated.

    `runs` are the numbers of tokens accepted by each step, `rejections` counts steps cut short by tau.
    """

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    rejections: int = 0
    reason: str = ""


class Oracle:
    """Predictions of one model for prefix + masks; remembered, because many tests walk the same prefixes."""

    def __init__(self, model: PreTrainedModel, mask_id: int, block: int) -> None:
        self.model, self.mask_id, self.block = model, mask_id, block
        self._known: dict[tuple[int, ...], list[Prediction]] = {}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[length, vocab] fp32 of one plain causal forward."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def predictions(self, prefix: Sequence[int], count: int) -> list[Prediction]:
        """Predictions for the `count` positions after `prefix`: output j has seen the prefix and j masks."""
        key = tuple(prefix)
        if key not in self._known:
            # One look ahead as far as any test asks: attention is causal, so an output does not see the masks
            # after it.
            logits = self.logits([*prefix, *[self.mask_id] * (self.block - 1)])[len(prefix) - 1 :]
            self._known[key] = [self._prediction(row) for row in logits]
        return self._known[key][:count]

    def _prediction(self, logits: torch.Tensor) -> Prediction:
        logits = logits.clone()
        logits[self.mask_id] = -torch.inf
        probabilities = torch.softmax(logits, -1)
        first, second = torch.topk(probabilities, 2).values.tolist()
        entropy = -torch.special.xlogy(probabilities, probabilities).sum()
        return Prediction(int(logits.argmax()), first, first - second, float(entropy))


def confident(prediction: Prediction, tau: float, metric: str) -> bool:
    if metric == "entropy":
        return prediction.entropy <= tau
    return (prediction.probability if metric == "probability" else prediction.margin) >= tau


def one_at_a_time(tau: float, metric: str) -> bool:
    return tau <= 0 if metric == "entropy" else tau >= 1


def generate(
    oracle: Oracle,
    prompt: Sequence[int],
    tau: float,
    metric: str = "probability",
    max_new: int = 24,
    eos: Collection[int] = (),
    cache_block: int = 1,
    capacity: int = 10**9,
    width: int | None = None,
) -> Answer:
    """Decode `prompt`. With `cache_block` 1 it looks `block` ahead, with more never past its block's end.

    `capacity`: a context of so many entries holds the tokens that are fed, so the last prediction is for
    position `capacity`.
    """
    answer = Answer()
    while True:
        if len(answer.tokens) >= max_new:
            answer.reason = "length"
            return answer
        if len(prompt) + len(answer.tokens) > capacity:
            answer.reason = "capacity"
            return answer
        ahead = 1 if one_at_a_time(tau, metric) else min(width or oracle.block, oracle.block)
        ahead = min(ahead, max_new - len(answer.tokens))
        ahead = min(ahead, capacity - len(prompt) - len(answer.tokens) + 1)
        if cache_block > 1:
            ahead = min(ahead, cache_block - len(answer.tokens) % cache_block)
        predictions = oracle.predictions([*prompt, *answer.tokens], ahead)
        run = 0
        for prediction in predictions:
            if run > 0 and not confident(prediction, tau, metric):
                answer.rejections += 1
                break
            answer.tokens.append(prediction.token)
            answer.confidences.append(getattr(prediction, metric))
            run += 1
            if prediction.token in eos:
                break
        answer.runs.append(run)
        if answer.tokens[-1] in eos:
            answer.reason = "eos"
            return answer
