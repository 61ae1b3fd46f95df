"""One sequence of a batch: its tokens, its cursor, what it asked for and how it ended. Knows nothing of the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..accept import accept, passes, verify
from .backend import StepOutput
from .config import GenerationConfig
from .feed import Feed
from .pass_rates import PassRates
from .prefix import Stem
from .proposals import NONE, Foresight, Hopes, Lookup, Proposals, Proposer
from .sample import Draws
from .split import Chances
from .stats import Stats

LEAST = 0.5  # chance that proposals hold, below which a row with a tau makes no more
ENOUGH = 3.0  # tokens that proposals promise, from which no other source is asked

FinishReason = Literal["eos", "stop", "length", "capacity", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one step gave one row. `finish_reason` is set in the row's last event, which may carry no tokens.

    `error` is what ended the row, if it failed; its finish_reason is then "cancelled". The first `verified`
    tokens had been proposed and held; those at the places `forced` are a grammar's.
    """

    row: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason | None
    error: BaseException | None = None
    verified: int = 0
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Predictions:
    """Consecutive predictions for one row, the first for its next unknown position; arrays of one length.

    `confidences` are of the metric that the row asked for, `probabilities` always probabilities.
    """

    token_ids: np.ndarray
    confidences: np.ndarray
    probabilities: np.ndarray
    logits: np.ndarray | None
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None

    @classmethod
    def of(cls, output: StepOutput, row: int, count: int, metric: str) -> Predictions:
        """The first `count` predictions of batch row `row`, with the confidence that `metric` names."""
        probabilities = confidences = output.confidence[row, :count]
        if metric != "probability":
            values = output.margin if metric == "margin" else output.entropy
            assert values is not None, f"{metric} was not exported: the session checks this first"
            confidences = values[row, :count]
        logits = None if output.logits is None else output.logits[row, :count]
        token_ids = output.token_ids[row, :count]
        if output.topk_ids is None or output.topk_logprobs is None:
            return cls(token_ids, confidences, probabilities, logits)
        wide = output.topk_ids[row, :count], output.topk_logprobs[row, :count]
        return cls(token_ids, confidences, probabilities, logits, *wide)

    def then(self, later: Predictions) -> Predictions:
        """These predictions followed by `later` ones."""
        logits = (
            None
            if self.logits is None or later.logits is None
            else np.concatenate([self.logits, later.logits])
        )
        return Predictions(
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.confidences, later.confidences]),
            np.concatenate([self.probabilities, later.probabilities]),
            logits,
        )


class Row:
    """A sequence being decoded.

    `tokens` is the prompt and everything accepted; `cursor` counts its final KV entries, so that
    `tokens[cursor:]` is pending. `proposals` are guesses of what follows, not part of the answer until
    verified. `config` may be replaced while the row runs: the next step uses the new one. `stop` sees each
    accepted token and says whether it completes a stop condition. `hopes` are shared by the rows of a
    session. `proposer`: another source of proposals than the row's masks. `stem`: the row's share in a store
    of prefixes. `client` is whose row it is, None for nobody's.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        stop: Callable[[int], bool] | None = None,
        stats: Stats | None = None,
        hopes: Hopes | None = None,
        proposer: Proposer | None = None,
        stem: Stem | None = None,
    ) -> None:
        self.index, self.config, self.stop, self.stem = index, config, stop, stem
        self.tokens = list(prompt)
        self.eos_ids = frozenset(eos_ids if config.eos_ids is None else config.eos_ids)
        self.cursor = 0
        self.finish_reason: FinishReason | None = None
        self.stats = stats or Stats()
        self.stats.prompt_tokens = len(prompt)
        self.pass_rates = PassRates()
        self.hopes, self.foresight = hopes or Hopes(), Foresight()
        self.proposals = NONE
        self.proposer = proposer if proposer is not None else Lookup(config.lookup) if config.lookup else None
        self.client: Hashable = None
        self.on_start: Callable[[], None] | None = None  # before each forward

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.cursor :]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cursor

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.config.max_new_tokens - self.stats.tokens

    def start(self) -> None:
        """It is about to take part in a forward."""
        self.stats.starts()
        if self.on_start is not None:
            self.on_start()

    @property
    def wants_logits(self) -> bool:
        return self.config.needs_logits

    @property
    def feeds_proposals(self) -> bool:
        """Whether a step may verify proposals, and feed one mask more than the block was trained for."""
        return bool(self.config.exact)

    @property
    def num_proposals(self) -> int:
        """Proposals that may be fed: none that ends the sequence, for the output before it says as much."""
        if not self.feeds_proposals:
            return 0
        token_ids = self.proposals.token_ids
        end = next((i for i, token in enumerate(token_ids) if token in self.eos_ids), len(token_ids))
        return max(0, min(end, self.remaining - 1))

    def most_masks(self, block: int) -> int:
        """Masks that the next step may feed if it feeds no proposals: none that can not be used."""
        config = self.config
        if config.one_token:
            return 0
        # A proposal too many costs its slot and no quality, and one mask beyond the block often holds.
        block = block + 1 if block > 1 and self.feeds_proposals else block - 1
        most = min(config.window - 1, block) if isinstance(config.window, int) else block
        return max(0, min(most, self.remaining - (2 if config.exact else 1)))

    def take(self, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        """What `feed` gave: its known tokens are final now, and what the rule and the limits allow is
        accepted.

        `i` is the row's place in `output`. None: nothing is accepted, the next step asks again.
        """
        self.cursor += feed.known
        self.stats.forwards += 1
        return self.accept(Predictions.of(output, i, feed.outputs, self.config.metric), feed.proposals)

    def accept(self, predictions: Predictions, num_proposals: int = 0) -> Accepted | None:
        """Accept from the left; the first `num_proposals` proposals were fed and are verified or dropped."""
        config = self.config  # another thread may put a new one there at any time
        token_ids = self.candidates(predictions, config)
        tau = 1.0 if config.tau is None else config.tau
        proposals = self.proposals.token_ids[:num_proposals] if num_proposals else ()
        if config.exact or proposals:
            count = verify(token_ids, proposals, self.eos_ids, self.remaining)
            confidences = self._confidences(predictions, token_ids, count)
        else:
            confidences = self._confidences(predictions, token_ids, len(token_ids))
            count = accept(token_ids, confidences, tau, config.metric, self.eos_ids, self.remaining)
        for i, token in enumerate(token_ids[:count]):
            self.tokens.append(token)
            if token in self.eos_ids:
                self.finish_reason = "eos"
            elif self.stop is not None and self.stop(token):
                count, self.finish_reason = i + 1, "stop"
                break
        num_held = max(0, count - 1) if config.exact or proposals else 0
        if config.exact or proposals:
            self._settle(token_ids, predictions.probabilities.tolist(), count, num_proposals)
        else:
            self.proposals = NONE
            # Where something else than tau ended the run, the row is over.
            self.pass_rates.saw(count, [passes(c, tau, config.metric) for c in confidences])
        self.stats.count(count)
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        given, sure = tuple(token_ids[:count]), tuple(confidences[:count])
        return Accepted(self.index, given, sure, self.finish_reason, verified=num_held)

    def _settle(self, token_ids: Sequence[int], probabilities: list[float], count: int, num_fed: int) -> None:
        """Proposals that held are final like known tokens; what was predicted behind is proposed next."""
        num_held = max(0, count - 1)
        self.cursor += num_held
        self.stats.proposed += num_fed
        self.stats.verified += num_held
        if self.finish_reason is None:  # else more may have held than were needed
            self.hopes.saw(self.proposals, num_fed, num_held)
        if num_held < num_fed or self.finish_reason is not None:
            # Predictions behind a wrong token are void: fresh masks are better guesses (docs/archive.md).
            self.proposals = NONE
            return
        self.proposals = Proposals(tuple(token_ids[count:]), tuple(probabilities[count:]))
        self.foresight.saw([self.hopes.of("masks", p) for p in probabilities[count:]])

    def begin(self, most: int) -> Accepted | None:  # noqa: ARG002 - for rows whose answer has a fixed beginning
        """What is known of the answer before any prediction, until the row has `most` tokens, or None."""
        return None

    def lead(self, proposals: Proposals) -> Proposals:
        """What of another source's proposals may be fed."""
        return proposals

    def look_around(self, most: int) -> None:
        """Take another source's proposals where they promise more; it is asked where those at hand promise
        little.
        """
        if self.proposer is None or not self.config.exact or most < 1:
            return
        own = self._promise(self.proposals)
        if own >= ENOUGH:
            return
        others = self.lead(self.proposer.propose(self.tokens, most))
        if self._promise(others) > own:
            self.proposals = others

    def _promise(self, proposals: Proposals) -> float:
        """Tokens that are expected to hold."""
        total, chance = 0.0, 1.0
        for hope in self.hopes.of_all(proposals):
            chance *= hope
            total += chance
        return total

    def chances(self, block: int, room: int) -> Chances:
        """What the next step may expect of the row, with `room` slots behind its known tokens."""
        proposals, num = self.proposals, self.num_proposals
        hopes = self.hopes.of_all(proposals)[: num + 1]
        ends = num < len(proposals) and proposals.token_ids[num] in self.eos_ids
        worth = self.foresight.expected(self.most_masks(block))
        return Chances(self.num_pending, tuple(hopes[:num]), hopes[num] if ends else None, tuple(worth), room)

    def finish(self, reason: FinishReason) -> Accepted:
        """End the row without tokens."""
        self.finish_reason = reason
        return Accepted(self.index, (), (), reason)

    def fail(self, error: BaseException) -> Accepted:
        """End the row because of `error`; what it has stays."""
        self.finish_reason, self.stem = self.finish_reason or "cancelled", None
        return Accepted(self.index, (), (), self.finish_reason, error)

    def candidates(self, predictions: Predictions, config: GenerationConfig, first: int = 0) -> Sequence[int]:
        """What the row makes of the predictions from `first` on; drawn ones as far as they are looked at."""
        if not config.needs_logits:
            tokens: list[int] = predictions.token_ids[first:].tolist()
            return tokens
        assert predictions.logits is not None, "logits were not exported: the session checks this first"
        return Draws(predictions.logits[first:], config, self.tokens)

    @staticmethod
    def _confidences(predictions: Predictions, token_ids: Sequence[int], count: int) -> list[float]:
        if isinstance(token_ids, Draws):
            return token_ids.confidences(count)
        confidences: list[float] = predictions.confidences[:count].tolist()
        return confidences
