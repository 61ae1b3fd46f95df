"""A sequence whose answer follows a grammar (docs/structured.md, "The rule")."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

from ..decode.backend import Predictions
from ..decode.event import Event
from ..decode.sample import Top, top_of
from ..decode.sequence import MIN_PROBABILITY, Sequence
from ..decode.speculation.drafts import NONE, DraftTokens
from .grammar_state import SURE, GrammarState


@dataclass(frozen=True, slots=True)
class Pick:
    """A token of a run, with the most likely tokens at its position if the config asks for them."""

    token: int
    confidence: float
    top: Top
    is_forced: bool = False


class ConstrainedSequence(Sequence):
    """A sequence that appends what its grammar forces, and accepts only what its grammar allows."""

    def __init__(self, *args: Any, grammar_state: GrammarState, **settings: Any) -> None:
        """`args` and `settings` are those of a Sequence."""
        super().__init__(*args, **settings)
        self.grammar_state = grammar_state

    @property
    def wants_logits(self) -> bool:
        return self.config.needs_logits or self.grammar_state.wants_logits

    @property
    def feeds_draft_tokens(self) -> bool:
        """Always: the grammar proposes forced tokens, with a tau too."""
        return True

    def filter_draft(self, draft_tokens: DraftTokens) -> DraftTokens:
        """The draft tokens that the grammar allows, with forced tokens between and after them."""
        return self.grammar_state.filter_draft(draft_tokens) if draft_tokens else NONE

    def begin(self, limit: int) -> Event | None:
        """Append the tokens that are forced before any prediction, until the sequence has `limit` tokens."""
        if self.grammar_state.begun:
            return None
        self.grammar_state.begun = True
        run: list[Pick] = []
        while self.finish_reason is None and self.remaining > 0 and len(self.tokens) < limit:
            if (pick := self._forced()) is None:
                break
            run.append(pick)
            self._append(pick.token)
            self.stats.tokens += 1
            self.stats.forced += 1
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        elif self.grammar_state.is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        elif not run:
            return None
        return self._event(run)

    def accept(self, predictions: Predictions, num_draft_tokens: int = 0) -> Event | None:
        """Append tokens from the left: the one that the grammar forces, else the one that the model chooses.

        Prediction i is for position i of the run. The model chooses by it only while `is_seen`: the tokens
        that were appended before it are the ones the model saw. The first `num_draft_tokens` positions were
        fed as draft tokens. None if no token was appended: the next step returns logits.
        """
        run: list[Pick] = []
        limit, is_seen, num_verified = self.remaining, True, 0
        while self.finish_reason is None and len(run) < limit:
            pick = self._forced() or (
                self._choice(predictions, len(run), num_verified, num_draft_tokens) if is_seen else None
            )
            if pick is None:
                break
            is_seen = is_seen and self._is_seen(pick, predictions, len(run), num_draft_tokens)
            num_verified += is_seen and len(run) < num_draft_tokens
            self._append(pick.token)
            run.append(pick)
        self._propose(predictions, [pick.token for pick in run], num_verified, num_draft_tokens)
        if self.grammar_state.is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        elif not run:
            return None
        num_forced = sum(pick.is_forced for pick in run)
        self._count(len(run) - num_forced, num_forced)
        return self._event(run, num_verified)

    def _is_seen(self, pick: Pick, predictions: Predictions, i: int, num_draft_tokens: int) -> bool:
        """Whether later predictions are for a text with `pick` at position i. A draft token was fed there, or
        a mask: then they are for the model's own token, or for the one that is drawn from its logits.
        """
        if i < num_draft_tokens:
            return pick.token == self.draft_tokens.token_ids[i]
        if self.config.host_chooses and not pick.is_forced:
            return True
        return i < len(predictions.token_ids) and pick.token == int(predictions.token_ids[i])

    def _forced(self) -> Pick | None:
        """The only token that the grammar allows, if there is only one."""
        token = self.grammar_state.forced()
        return (
            None if token is None else Pick(token, SURE[self.config.metric], ((token, 0.0),), is_forced=True)
        )

    def _choice(
        self, predictions: Predictions, i: int, num_verified: int, num_draft_tokens: int
    ) -> Pick | None:
        """The token for position i, if the grammar leaves a choice; None ends the run.

        Prediction `num_verified` is the model's own next token. Later ones are predictions of masks: exact
        mode accepts none of them, a tau the passing ones, up to the number of masks that the model was
        trained for.
        """
        config = self.config
        if self.grammar_state.is_over or i >= len(predictions.token_ids):
            return None
        is_guess = i != num_verified
        if is_guess and (config.exact or config.one_token):
            return None
        penalties = self.penalties.follow(self.tokens)
        choice = self.grammar_state.choose(predictions, i, config, penalties, len(self.tokens), not is_guess)
        if choice is None:
            return None
        if is_guess and not (
            config.passes(choice[1]) and i - num_draft_tokens <= self.grammar_state.max_masks
        ):
            return None
        return Pick(*choice, self._top(predictions, i))

    def _top(self, predictions: Predictions, i: int) -> Top:
        """The most likely tokens of prediction `i`, if the config asks for them."""
        if not self.config.top_logprobs:
            return ()
        assert predictions.logits is not None, "logits were not exported: the session checks this first"
        logits = self.penalties.follow(self.tokens).of(predictions.logits[i])
        return top_of(logits, self.config.top_logprobs)

    def _event(self, run: abc.Sequence[Pick], num_verified: int = 0) -> Event:
        tops = tuple(pick.top for pick in run) if self.config.top_logprobs else ()
        tokens, confidences = tuple(pick.token for pick in run), tuple(pick.confidence for pick in run)
        forced = tuple(i for i, pick in enumerate(run) if pick.is_forced)
        return self.event(tokens, confidences, num_verified, forced, tops)

    def _append(self, token: int) -> None:
        self.grammar_state.append(token)
        super()._append(token)

    def _propose(
        self, predictions: Predictions, appended: abc.Sequence[int], num_verified: int, num_draft_tokens: int
    ) -> None:
        """Move the cursor past the verified draft tokens, and propose the predictions after `appended`."""
        count = len(appended)
        self.count_draft_tokens(num_draft_tokens, num_verified, appended)
        if not self.config.exact:
            confidences = enumerate(predictions.confidences)
            passed = [i < count or self.config.passes(c) for i, c in confidences]
            self.pass_rates.record(max(count - num_draft_tokens, 0), passed[num_draft_tokens:])
        self.draft_tokens = guess = NONE
        if self.finish_reason is not None:
            return
        if predictions.mtp_drafts:
            guess = predictions.mtp_draft(appended, num_verified)
        elif num_verified == num_draft_tokens:
            probabilities = predictions.probabilities.tolist()
            self.see_masks(probabilities[num_draft_tokens + 1 :])
            # Predictions after a token that differs from the model's own one are void.
            predicted_ids = predictions.token_ids[num_draft_tokens:count].tolist()
            if self.config.host_chooses or list(appended[num_draft_tokens:]) == predicted_ids:
                predicted = self.candidates(predictions, count)[:]
                guess = DraftTokens(tuple(predicted), tuple(probabilities[count:]))
        self.draft_tokens = self.grammar_state.filter_draft(
            guess, 0.0 if self.config.exact else MIN_PROBABILITY
        )
