"""One sequence of a batch: its tokens, its cursor, its settings and how it ended."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import numpy as np

from ..accept import accept, verify
from ..errors import SessionError
from .backend import Predictions, StepOutput, StepPlan
from .config import GenerationConfig
from .event import AnswerText, Event, FinishReason
from .prefix import PrefixHandle
from .sample import Penalties, SampledTokens, Top, top_of
from .speculation.drafts import (
    NONE,
    AcceptanceRates,
    DraftTokens,
    MaskRates,
    PassRates,
    PromptLookup,
    StepForecast,
    expected_run,
)
from .stats import Stats

# A sequence with a tau proposes tokens only while all of them are this likely to be accepted.
MIN_PROBABILITY = 0.5
LOOKUP_BELOW = 3.0  # nothing is looked up if this many draft tokens will probably be accepted


class Sequence:
    """A sequence that is being decoded.

    index: its number, also in its events.
    tokens: the prompt and all accepted tokens.
    cursor: the number of final KV entries, so `tokens[cursor:]` is pending.
    num_reproducible: leading entries with the bits that they have in any other sequence; these are cached.
    block: slots of the blocks that the model was trained for. The schedule sets it and `cache_block`.
    cache_block: with a tau the cursor moves when this many tokens are pending.
    draft_tokens: predicted next tokens that are not verified yet.
    config, finish_reason: of the current step; `change` and `end` in other threads apply from the next one.
    stream: the text of its answer, which knows the stop strings; None without a tokenizer.
    acceptance_rates: shared by the sequences of a session.
    prompt_lookup: another source of draft tokens than the sequence's masks.
    prefix_handle: the sequence's connection to the prefix cache.
    mask_limit: the most masks of a step; None for the block's.
    client, on_forward: whose sequence it is, None for no client, and what is called before each of its
        forwards; a batcher sets them.
    check: raises SessionError for a config that the sequence's session does not support.
    """

    def __init__(
        self,
        index: int,
        prompt: abc.Sequence[int],
        config: GenerationConfig,
        eos_ids: abc.Sequence[int],
        stream: AnswerText | None = None,
        stats: Stats | None = None,
        acceptance_rates: AcceptanceRates | None = None,
        prefix_handle: PrefixHandle | None = None,
        *,
        mask_limit: int | None = None,
        check: Callable[[GenerationConfig], None] | None = None,
    ) -> None:
        self.index, self.config, self.stream, self.prefix_handle = index, config, stream, prefix_handle
        self.mask_limit, self._check = mask_limit, check
        self.client: Hashable = None
        self.on_forward: Callable[[], None] | None = None
        self.next_config = config  # of other threads, as is `_end_reason`, until `refresh` takes them
        self._end_reason: FinishReason | None = None
        self.tokens = list(prompt)
        self.eos_ids = frozenset(eos_ids if config.eos_ids is None else config.eos_ids)
        self.cursor, self.num_reproducible = 0, 0
        self.block = self.cache_block = 1
        self.num_passes = 0  # sequences that started before this one while it waited for memory
        self.finish_reason: FinishReason | None = None
        self.stats = stats or Stats()
        self.stats.prompt_tokens = len(prompt)
        self.pass_rates, self.mask_rates = PassRates(), MaskRates()
        self.acceptance_rates = acceptance_rates or AcceptanceRates()
        self.draft_tokens = NONE
        self.prompt_lookup = PromptLookup(config.prompt_lookup) if config.prompt_lookup else None

    @cached_property
    def penalties(self) -> Penalties:
        """The bias and the penalties of its logits, which most sequences do not have."""
        return Penalties(self.config, self.stats.prompt_tokens)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cursor

    @property
    def next_copy(self) -> int | None:
        """Tokens of the prompt after which the prefix cache copies the states; None for no such place."""
        return None if self.prefix_handle is None else self.prefix_handle.stop(self.cursor)

    @property
    def text(self) -> str:
        """The text of the answer so far."""
        return "" if self.stream is None else self.stream.text

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.config.max_new_tokens - self.stats.tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is being read: no forward of it has had outputs."""
        return not self.stats.forwards

    # --- for other threads, while the sequence runs ---

    def change(self, **settings: Any) -> None:
        """Change settings from the next step on. Raises SessionError for values that cannot be."""
        config = self.next_config.with_values(**settings)
        if self._check is not None:
            self._check(config)
        self.next_config = config

    def end(self, reason: FinishReason) -> None:
        """End the sequence before its next step. An ended one keeps its reason."""
        self._end_reason = self._end_reason or reason

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or will before its next step."""
        return (self.finish_reason or self._end_reason) is not None

    # --- between two steps ---

    def refresh(self) -> None:
        """Take what other threads asked for: a step sees one config and one finish_reason."""
        self.config = self.next_config
        self.finish_reason = self.finish_reason or self._end_reason

    # --- what the next step feeds ---

    @property
    def wants_logits(self) -> bool:
        return self.config.needs_logits

    @property
    def feeds_draft_tokens(self) -> bool:
        """Whether a step may verify draft tokens, and thus feed more masks than the model was trained for."""
        return bool(self.config.exact)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that may be fed. An end-of-sequence draft token is not: the output before it decides.

        One less than the remaining tokens, because the output after them gives another.
        """
        if not self.feeds_draft_tokens:
            return 0
        end = next((i for i in range(len(self.draft_tokens)) if self.ends_at(i)), len(self.draft_tokens))
        return max(0, min(end, self.remaining - 1))

    @property
    def commits_blocks(self) -> bool:
        """Whether the cursor waits for a whole cache block: with a tau. Draft tokens need it to move."""
        return self.cache_block > 1 and not self.feeds_draft_tokens

    @property
    def is_full(self) -> bool:
        """Whether the pending tokens become final in the next step."""
        return self.is_prefilling or not self.commits_blocks or self.num_pending >= self.cache_block

    def max_masks(self) -> int:
        """Most masks that the next step may feed without draft tokens; no more than can be used, and none
        after the end of the cache block.
        """
        config = self.config
        if config.one_token:
            return 0
        # Two more than the model was trained for cost their slots and no quality, and are often accepted.
        limit = self.block - 1
        if limit > 0 and self.feeds_draft_tokens:
            limit += 2
        if isinstance(config.masks, int):
            limit = min(config.masks, limit)
        if self.mask_limit is not None:
            limit = min(self.mask_limit, limit)
        if self.commits_blocks:
            limit = min(limit, self.cache_block - 1 - (0 if self.is_full else self.num_pending))
        return max(0, min(limit, self.usable_masks()))

    def usable_masks(self, draft_tokens: int = 0) -> int:
        """Most masks, after `draft_tokens`, whose predictions fit in the rest of the answer: the step gives
        one token besides, and in exact mode the step that verifies them gives another.
        """
        return max(0, self.remaining - draft_tokens - (2 if self.config.exact else 1))

    def ends_at(self, i: int) -> bool:
        """Whether draft token `i` exists and ends the sequence."""
        return i < len(self.draft_tokens) and self.draft_tokens.token_ids[i] in self.eos_ids

    def widest_plan(self, room: int) -> StepPlan:
        """All pending tokens, all draft tokens, and as many masks as are allowed and fit in `room` slots."""
        draft_tokens = max(0, min(self.num_draft_tokens, room))
        masks = min(self.max_masks(), room - draft_tokens)
        if self.config.exact or draft_tokens:
            masks = 0 if self.ends_at(draft_tokens) else min(masks, self.usable_masks(draft_tokens))
        return StepPlan(self.num_pending, draft_tokens, max(0, masks))

    def expected_of_prompt(self, masks: int) -> list[float]:
        """Expected number of accepted draft tokens of 0, 1, ... `masks` masks of its prompt."""
        return self.acceptance_rates.expected_of_prompt(masks)

    def consult_prompt_lookup(self, limit: int) -> None:
        """Replace the draft tokens by looked-up ones if more of these will probably be accepted."""
        if self.prompt_lookup is None or not self.config.exact or limit < 1:
            return
        expected = self._expected_accepted(self.draft_tokens)
        if expected < LOOKUP_BELOW:
            others = self.filter_draft(self.prompt_lookup.propose(self.tokens, limit))
            if not self.draft_tokens or self._expected_accepted(others) > expected:
                self.draft_tokens = others

    def _expected_accepted(self, draft_tokens: DraftTokens) -> float:
        return expected_run(self.acceptance_rates.probabilities(draft_tokens))[-1]

    def forecast(self, room: int) -> StepForecast:
        """The expectations of the next step for the sequence, with `room` slots after its pending tokens."""
        num, probabilities = self.num_draft_tokens, self.acceptance_rates.probabilities(self.draft_tokens)
        expected = self.mask_rates.expected(self.max_masks())
        ending = probabilities[num] if self.ends_at(num) else None
        return StepForecast(self.num_pending, tuple(probabilities[:num]), ending, expected, room)

    # --- hooks of ConstrainedSequence, which also overrides `accept`, `_append` and two properties ---

    def begin(self, limit: int) -> Event | None:  # noqa: ARG002
        """Append tokens that are known without a prediction, up to `limit` tokens in all."""
        return None

    def filter_draft(self, draft_tokens: DraftTokens) -> DraftTokens:
        """The part of the looked-up draft tokens that may be fed."""
        return draft_tokens

    # --- what a step gave ---

    def commit_chunk(self, num_tokens: int) -> None:
        """A chunk of the pending tokens is final; its output is not used."""
        self.cursor += num_tokens
        if self.is_prefilling:
            self.stats.prefill_forwards += 1
        else:
            self.stats.forwards += 1

    def commit_and_accept(self, output: StepOutput, i: int, plan: StepPlan) -> Event | None:
        """Take the outputs of `plan`, which are those of batch row `i`. Its pending tokens are final now if
        the cache block is full.

        None, only for a sequence with a grammar, if nothing can be accepted; the next step tries again.
        """
        predictions = Predictions.of(output, i, plan.outputs, self.config)
        if np.isnan(predictions.probabilities[: plan.outputs]).any():
            raise SessionError(
                "the model's predictions are not numbers (NaN); export the bundle again", code="failed"
            )
        if self.is_full:
            self.cursor += plan.pending
        self.stats.forwards += 1
        return self.accept(predictions, plan.draft_tokens)

    def accept(self, predictions: Predictions, num_draft_tokens: int = 0) -> Event | None:
        """Accept predictions from the left. The first `num_draft_tokens` draft tokens were fed; the
        predictions verify them.
        """
        config = self.config
        token_ids, refused = self.candidates(predictions), None
        is_verified = bool(config.exact or num_draft_tokens)
        if is_verified:
            draft_tokens = self.draft_tokens.token_ids[:num_draft_tokens]
            count = verify(token_ids, draft_tokens, self.eos_ids, self.remaining)
            confidences = self._confidences(predictions, token_ids, count)
        else:
            assert config.tau is not None
            confidences = self._confidences(predictions, token_ids, len(token_ids))
            count = accept(token_ids, confidences, config.tau, config.metric, self.eos_ids, self.remaining)
            if count < min(len(token_ids), self.remaining) and token_ids[count - 1] not in self.eos_ids:
                refused = confidences[count]
        num_verified = max(0, count - 1) if is_verified else 0
        for i, token in enumerate(token_ids[:count]):
            self._append(token)
            if self.finish_reason is not None:
                count = i + 1
                num_verified = min(num_verified, count)
                break
        if is_verified:
            self._advance(token_ids, predictions, count, num_verified, num_draft_tokens)
        else:
            self.draft_tokens = NONE
            # If something other than tau ended the run, the sequence is over.
            self.pass_rates.record(count, [config.passes(c) for c in confidences])
        self._count(count, refused=refused)
        kept, tops = tuple(token_ids[:count]), self._tops(predictions, token_ids, count)
        return self.event(kept, tuple(confidences[:count]), num_verified, top_logprobs=tops)

    def event(
        self,
        token_ids: tuple[int, ...] = (),
        confidences: tuple[float, ...] = (),
        accepted_draft_tokens: int = 0,
        forced: tuple[int, ...] = (),
        top_logprobs: tuple[Top, ...] = (),
    ) -> Event:
        """The outcome of a step, with what it adds to the text."""
        text, texts = "", ("",) * len(token_ids)
        if self.stream is not None:
            text = self.stream.read() if self.finish_reason is None else self.stream.finish()
            texts = self.stream.take_token_texts(len(token_ids))
        how = (self.finish_reason, accepted_draft_tokens, forced, top_logprobs)
        return Event(text, token_ids, confidences, *how, texts, self.index)

    def _append(self, token: int) -> None:
        """Make `token` part of the answer, which it may end."""
        self.tokens.append(token)
        if token in self.eos_ids:
            self.finish_reason = "eos"
        elif self.stream is not None and self.stream.push(token):
            self.finish_reason = "stop"

    def _advance(
        self,
        token_ids: abc.Sequence[int],
        predictions: Predictions,
        count: int,
        num_verified: int,
        num_draft_tokens: int,
    ) -> None:
        """Move the cursor past verified draft tokens, and propose the predictions after `count` tokens."""
        self.count_draft_tokens(num_draft_tokens, num_verified, token_ids[:count])
        if predictions.mtp_drafts and self.finish_reason is None:
            self.draft_tokens = predictions.mtp_draft(token_ids[:count], num_verified)
        elif num_verified < num_draft_tokens or self.finish_reason is not None:
            self.draft_tokens = NONE  # predictions after a wrong draft token are void: new masks are better
        else:
            probabilities = predictions.probabilities.tolist()[count:]
            self.draft_tokens = DraftTokens(tuple(token_ids[count:]), tuple(probabilities))
            self.see_masks(probabilities)

    def count_draft_tokens(self, num_fed: int, num_verified: int, appended: abc.Sequence[int]) -> None:
        """Move the cursor past the verified draft tokens, and count them; forced ones count neither as
        proposed nor as verified.
        """
        # The last token is always fed again: the next prediction is its output.
        self.cursor = min(self.cursor + num_verified, len(self.tokens) - 1)
        num_forced = self.draft_tokens.num_forced
        self.stats.draft_tokens += num_fed - num_forced(num_fed)
        self.stats.accepted_draft_tokens += num_verified - num_forced(num_verified)
        self.acceptance_rates.record(self.draft_tokens, appended[: num_verified + 1])

    def see_masks(self, probabilities: abc.Sequence[float]) -> None:
        """Learn from the probabilities of a step's masks."""
        accepted = [self.acceptance_rates.probability("masks", p) for p in probabilities]
        self.mask_rates.record(accepted)
        if accepted and self.stats.forwards == 1:
            self.acceptance_rates.record_prompt(accepted)

    def _count(self, num_accepted: int, num_forced: int = 0, refused: float | None = None) -> None:
        """Count a step, which may have been the last for the length of the answer."""
        if num_accepted or num_forced:
            self.stats.count(num_accepted, num_forced, refused)
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"

    def candidates(self, predictions: Predictions, first: int = 0) -> abc.Sequence[int]:
        """The tokens for the predictions from `first` on. Sampled ones are drawn when they are read."""
        if not self.config.host_chooses:
            return list(predictions.token_ids[first:].tolist())
        assert predictions.logits is not None, "logits were not exported: the session checks this first"
        penalties = self.penalties.follow(self.tokens)
        return SampledTokens(predictions.logits[first:], self.config, penalties, len(self.tokens))

    def _tops(self, predictions: Predictions, token_ids: abc.Sequence[int], count: int) -> tuple[Top, ...]:
        """The most likely tokens at the positions of the first `count` tokens."""
        if not self.config.top_logprobs:
            return ()
        logits = token_ids.penalized if isinstance(token_ids, SampledTokens) else predictions.logits
        assert logits is not None, "logits were not exported: the session checks this first"
        return tuple(top_of(logits[i], self.config.top_logprobs) for i in range(count))

    @staticmethod
    def _confidences(predictions: Predictions, token_ids: abc.Sequence[int], count: int) -> list[float]:
        if isinstance(token_ids, SampledTokens):
            return token_ids.confidences(count)
        return list(predictions.confidences[:count].tolist())

    # --- ends that no token brings ---

    def finish(self, reason: FinishReason) -> Event:
        """End the sequence without tokens."""
        self.finish_reason = reason
        return self.event()

    def fail(self, error: BaseException) -> Event:
        """End the sequence because of `error`; it keeps its tokens."""
        self.finish_reason, self.prefix_handle = self.finish_reason or "cancelled", None
        return Event("", (), (), self.finish_reason, seq=self.index, error=error)
