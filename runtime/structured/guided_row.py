"""A row whose answer follows a grammar (docs/structured.md, "The rule")."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..decode.config import GenerationConfig
from ..decode.pace.estimates import Hopes
from ..decode.pace.proposals import NONE, Proposals
from ..decode.prefix import Stem
from ..decode.row import LEAST, Accepted, Predictions, Row
from ..decode.sample import Top, top_of
from ..decode.stats import Stats
from .guide import SURE, Guide


class GuidedRow(Row):
    """A row that appends what its grammar forces, and accepts only what its grammar allows."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        guide: Guide,
        stop: Callable[[int], bool] | None = None,
        stats: Stats | None = None,
        hopes: Hopes | None = None,
        stem: Stem | None = None,
    ) -> None:
        super().__init__(index, prompt, config, eos_ids, stop, stats, hopes, stem)
        self.guide = guide

    @property
    def wants_logits(self) -> bool:
        return self.config.needs_logits or self.guide.wants_logits

    @property
    def feeds_proposals(self) -> bool:
        """Always: the grammar proposes forced tokens, with a tau too."""
        return True

    def lead(self, proposals: Proposals) -> Proposals:
        """The proposals that the grammar allows, with forced tokens between and after them."""
        return self.guide.lead(proposals) if proposals else NONE

    def begin(self, most: int) -> Accepted | None:
        """Append the tokens that are forced before any prediction, until the row has `most` tokens."""
        if self.guide.begun:
            return None
        self.guide.begun = True
        forced: list[int] = []
        while self.finish_reason is None and self.remaining > 0 and len(self.tokens) < most:
            if (token := self.guide.forced()) is None:
                break
            self._append(token)
            forced.append(token)
            self.stats.tokens += 1
            self.stats.forced += 1
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        elif self.guide.is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        elif not forced:
            return None
        confidences = (SURE[self.config.metric],) * len(forced)
        places = tuple(range(len(forced)))
        tops = self._returned([_sure(token) for token in forced])
        return Accepted(
            self.index, tuple(forced), confidences, self.finish_reason, forced=places, top_logprobs=tops
        )

    def accept(self, predictions: Predictions, num_proposals: int = 0) -> Accepted | None:
        """Append tokens from the left: the forced one, else the one that `_choice` accepts.

        Prediction i is for position i of the run. It counts only while the model saw exactly the tokens that
        were appended before it (`follows`). The first `num_proposals` positions were fed as proposals;
        `num_verified` of those were appended. None if no token was appended: the next step returns logits.
        """
        config, guide = self.config, self.guide
        proposals = self.proposals.token_ids[:num_proposals]
        first, most = len(self.tokens), self.remaining
        confidences: list[float] = []
        forced: list[int] = []
        tops: list[Top] = []
        num_verified, follows = 0, True
        while self.finish_reason is None and (i := len(confidences)) < most:
            token, confidence = guide.forced(), SURE[config.metric]
            if token is not None:
                forced.append(i)
                tops.append(_sure(token))
            else:
                choice = self._choice(predictions, i, num_verified, num_proposals) if follows else None
                if choice is None:
                    break
                token, confidence = choice
                tops += self._top(predictions, i)
            confidences.append(confidence)
            self._append(token)
            if i < num_proposals:
                follows = follows and token == proposals[i]
                num_verified += follows
            elif i in forced[-1:] or not config.host_chooses:
                follows = follows and i < len(predictions.token_ids) and token == predictions.token_ids[i]
        self._propose(predictions, self.tokens[first:], num_verified, num_proposals)
        if guide.is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        elif not confidences:
            return None
        if confidences:
            self.stats.count(len(confidences) - len(forced), len(forced))
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        tokens = tuple(self.tokens[first:])
        how = (None, num_verified, tuple(forced), self._returned(tops))
        return Accepted(self.index, tokens, tuple(confidences), self.finish_reason, *how)

    def _choice(
        self, predictions: Predictions, i: int, num_verified: int, num_proposals: int
    ) -> tuple[int, float] | None:
        """Token and confidence for position i, if the grammar leaves a choice; None ends the run.

        Prediction `num_verified` is the model's own next token. Later ones are predictions of masks: exact
        mode accepts none of them, a tau those that pass it, up to the number of masks that the model was
        trained for.
        """
        config = self.config
        if self.guide.is_over or i >= len(predictions.token_ids):
            return None
        is_guess = i != num_verified
        if is_guess and (config.exact or config.one_token):
            return None
        penalties = self.penalties.follow(self.tokens)
        choice = self.guide.choose(predictions, i, config, penalties, len(self.tokens), not is_guess)
        if choice is None or not is_guess:
            return choice
        return choice if config.passes(choice[1]) and i - num_proposals <= self.guide.most_masks else None

    def _top(self, predictions: Predictions, i: int) -> list[Top]:
        """The most likely tokens of prediction `i`, if the config asks for them."""
        if not self.config.top_logprobs:
            return []
        assert predictions.logits is not None, "logits were not exported: the session checks this first"
        logits = self.penalties.follow(self.tokens).of(predictions.logits[i])
        return [top_of(logits, self.config.top_logprobs)]

    def _returned(self, tops: Sequence[Top]) -> tuple[Top, ...]:
        if not self.config.top_logprobs:
            return ()
        self.top_logprobs += tops
        return tuple(tops)

    def _append(self, token: int) -> None:
        self.guide.append(token)
        super()._append(token)

    def _propose(
        self, predictions: Predictions, appended: Sequence[int], num_verified: int, num_proposals: int
    ) -> None:
        """Move the cursor past the verified proposals, and propose the predictions after `appended`."""
        # The last token is always fed again: the next prediction is its output.
        self.cursor = min(self.cursor + num_verified, len(self.tokens) - 1)
        self._count(predictions, len(appended), num_verified, num_proposals)
        self.proposals = NONE
        if self.finish_reason is not None:
            return
        guess, count = NONE, len(appended)
        if num_verified == num_proposals:
            probabilities = predictions.probabilities.tolist()
            self.foresight.saw([self.hopes.of("masks", p) for p in probabilities[num_proposals + 1 :]])
            # Predictions after a token that differs from the model's own one are void.
            predicted_ids = predictions.token_ids[num_proposals:count].tolist()
            if self.config.host_chooses or list(appended[num_proposals:]) == predicted_ids:
                predicted = self.candidates(predictions, self.config, count)[:]
                guess = Proposals(tuple(predicted), tuple(probabilities[count:]))
        self.proposals = self.guide.lead(guess, 0.0 if self.config.exact else LEAST)

    def _count(
        self, predictions: Predictions, num_appended: int, num_verified: int, num_proposals: int
    ) -> None:
        """Count a step; forced proposals count neither as proposed nor as verified."""
        num_forced = self.proposals.num_forced
        self.stats.proposed += num_proposals - num_forced(num_proposals)
        self.stats.verified += num_verified - num_forced(num_verified)
        if self.finish_reason is None:
            self.hopes.saw(self.proposals, num_proposals, num_verified)
        if not self.config.exact:
            confidences = enumerate(predictions.confidences)
            passed = [i < num_appended or self.config.passes(c) for i, c in confidences]
            self.pass_rates.saw(max(num_appended - num_proposals, 0), passed[num_proposals:])


def _sure(token: int) -> Top:
    """The only token that a grammar allows."""
    return ((token, 0.0),)
