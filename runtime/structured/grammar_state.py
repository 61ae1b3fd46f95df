"""A sequence's grammar: the tokens that it allows and forces, and how its state is created."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import suppress
from functools import cached_property

import numpy as np

from ..bundle.open import Bundle
from ..decode.backend import Predictions
from ..decode.config import GenerationConfig
from ..decode.sample import Penalties, choose, confidence_of
from ..decode.speculation.drafts import DraftTokens
from ..errors import SessionError
from ..text.dialects import dialect_in
from ..text.tokenizer import Text
from .grammar import Grammars
from .matcher import TokenMatcher, leaves_a_choice
from .stored_grammars import find, request_of
from .vocabulary import Vocabulary

LIKELY = 0.6  # share of the continuations from which on the grammar proposes a token by itself
MAX_DRAFT_TOKENS = 64  # draft tokens, forced tokens included
SURE = {"probability": 1.0, "margin": 1.0, "entropy": 0.0}  # confidence of the only allowed token


class GrammarState:
    """A sequence's matcher, and the queue of forced tokens that are not appended yet.

    All queued tokens are appended before the matcher is asked again, so that the answer does not depend on
    the number of tokens in a step. `has_logits` says whether the graph can return logits; without them,
    tokens are chosen from its top-k. `max_masks` is the number of masks that the model was trained for; tau
    accepts no prediction of a later one.
    """

    def __init__(
        self, matcher: TokenMatcher, eos_ids: Collection[int], has_logits: bool, max_masks: int = 64
    ) -> None:
        self.matcher, self._has_logits, self.max_masks = matcher, has_logits, max_masks
        self._eos_ids = frozenset(eos_ids)
        self._queue: deque[int] = deque()
        self.begun = False
        self.wants_logits = False
        """True after a choice that needed logits; later steps return them."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and the model has no end-of-sequence token."""
        return not self._queue and not self._eos_ids and self.matcher.is_over

    def forced(self) -> int | None:
        """The token that must come next, end-of-sequence tokens included; None if there is a choice."""
        if not self._queue:
            self._queue.extend(self.matcher.forced())
        if self._queue:
            return self._queue[0]
        return min(self._eos_ids) if self._eos_ids and self.matcher.is_over else None

    def append(self, token: int) -> None:
        """Append the forced token, if there is one, else an allowed one."""
        if self._queue:
            assert token == self._queue[0], "a forced run is appended whole"
            self._queue.popleft()
        if token not in self._eos_ids:
            self.matcher.consume(token)

    def allowed(self) -> np.ndarray:
        """Bool [vocab]: the tokens that may follow if none is forced, end-of-sequence tokens included."""
        mask = self.matcher.mask().copy()
        for token in self._eos_ids:
            if token < len(mask):
                mask[token] = self.matcher.may_end
        return mask

    def choose(
        self,
        candidates: Predictions,
        i: int,
        config: GenerationConfig,
        penalties: Penalties,
        position: int,
        strict: bool,
    ) -> tuple[int, float] | None:
        """The token for absolute `position` and its confidence, by prediction `i` under the grammar.

        It is the most likely allowed token, or with a temperature a draw among the allowed ones. None means
        that another step must predict again: prediction `i` has too few candidates, or (unless `strict`) its
        context has changed. Raises SessionError if no step of this graph could tell.
        """
        if config.host_chooses:
            assert candidates.logits is not None, "logits were not exported: the session checks this first"
            return choose(candidates.logits[i], config, penalties, position, self.allowed())
        token = int(candidates.token_ids[i])
        if _may_follow(self.matcher, token, self._eos_ids):
            return token, float(candidates.confidences[i])
        return self._best(candidates, i, self.allowed(), config.metric) if strict or i == 0 else None

    def _best(
        self, candidates: Predictions, i: int, allowed: np.ndarray, metric: str
    ) -> tuple[int, float] | None:
        if candidates.topk_ids is not None and candidates.topk_logprobs is not None:
            ids, logprobs = candidates.topk_ids[i], candidates.topk_logprobs[i]
            places = np.flatnonzero(allowed[ids])
            if len(places):
                at = int(places[0])
                probability, top = float(np.exp(logprobs[at])), float(np.exp(logprobs[0]))
                confidences = {"probability": probability, "margin": probability - top}
                return int(ids[at]), confidences.get(metric, float(candidates.confidences[i]))
        if candidates.logits is not None:
            logits = candidates.logits[i]
            token = int(np.where(allowed, logits, -np.inf).argmax())
            return token, confidence_of(logits, token, metric)
        if i == 0 and not self._has_logits:
            source = "its top-k holds" if candidates.topk_ids is not None else "this bundle gives"
            raise SessionError(
                f"the grammar allows none of the tokens that {source} at this position, and there are no"
                " logits to choose from; export the bundle without --no-logits",
                code="unsupported_by_model",
            )
        self.wants_logits = self.wants_logits or i == 0
        return None

    def filter_draft(self, guess: DraftTokens, min_probability: float = 0.0) -> DraftTokens:
        """The draft tokens of `guess` that the grammar allows, with forced tokens between and after them.

        After the end of the guess, tokens follow that the grammar makes likely. It ends when the
        probability that all draft tokens are accepted falls below `min_probability`.
        """
        if self._queue:
            return guess
        matcher, at, probability = self.matcher.copy(), 0, 1.0
        token_ids: list[int] = []
        confidences: list[float] = []
        forced_places: list[int] = []

        def add(token: int, confidence: float) -> None:
            nonlocal at
            # After a token other than the guessed one, the rest of the guess is void.
            at = at + 1 if at < len(guess) and guess.token_ids[at] == token else len(guess)
            token_ids.append(token)
            confidences.append(confidence)

        while len(token_ids) < MAX_DRAFT_TOKENS:
            if forced := matcher.forced():
                for token in forced:
                    matcher.consume(token)
                    forced_places.append(len(token_ids))
                    add(token, 1.0)
                continue
            if matcher.is_over:
                if self._eos_ids:
                    forced_places.append(len(token_ids))
                    add(min(self._eos_ids), 1.0)
                break
            draft_token = self._guessed(matcher, guess, at)
            if draft_token is None or (probability := probability * draft_token[1]) < min_probability:
                break
            token, confidence = draft_token
            add(token, confidence)
            if token in self._eos_ids:
                break
            matcher.consume(token)
        return DraftTokens(tuple(token_ids), tuple(confidences), guess.source, frozenset(forced_places))

    def _guessed(self, matcher: TokenMatcher, guess: DraftTokens, at: int) -> tuple[int, float] | None:
        """A token for a choice: the guess if it is allowed, else one that the grammar makes likely."""
        if at < len(guess):
            token = guess.token_ids[at]
            if _may_follow(matcher, token, self._eos_ids):
                return token, guess.confidences[at]
        likely = matcher.likely()
        return likely if likely is not None and likely[1] >= LIKELY else None


def _may_follow(matcher: TokenMatcher, token: int, eos_ids: Collection[int]) -> bool:
    """Whether a token may come next if none is forced, end-of-sequence tokens included."""
    return matcher.may_end if token in eos_ids else matcher.allows(token)


class GrammarStateFactory:
    """Makes grammar states for a bundle whose graph returns `outputs`. Thread-safe."""

    def __init__(self, bundle: Bundle, text: Text | None, outputs: Collection[str]) -> None:
        self._bundle, self._text, self._outputs = bundle, text, outputs

    def prepare(self) -> None:
        """Build the vocabulary, if this bundle and installation have structured answers."""
        if {"logits", "topk_ids"} & set(self._outputs):
            with suppress(SessionError):
                self._grammars  # noqa: B018

    def of(self, config: GenerationConfig, thinking: bool | None = None) -> GrammarState:
        """A grammar state at the beginning of an answer. Calls of `tools` may come after `thinking`; True:
        the prompt has begun it. Raises SessionError if there can be none.
        """
        manifest, outputs = self._bundle.manifest, self._outputs
        try:
            stored = None if config.grammar is None else find(manifest, config.grammar, self._bundle.path)
            if stored is None:
                matcher = self._grammars.matcher(config, thinking)
            else:
                matcher = self._grammars.matcher(request_of(stored))
        except SessionError as error:
            error.code, error.field = "invalid_grammar", config.structure
            raise
        if "logits" not in outputs and "topk_ids" not in outputs and leaves_a_choice(matcher):
            raise SessionError(
                "schema, regex, choice, tools and grammar need a bundle with logits or with --top-k 16:"
                " when the most likely token is not allowed, another one must be chosen",
                code="unsupported_by_model",
                field=config.structure,
            )
        eos_ids = manifest.tokens.eos if config.eos_ids is None else config.eos_ids
        return GrammarState(matcher, eos_ids, "logits" in outputs, manifest.block - 1)

    @cached_property
    def _grammars(self) -> Grammars:
        manifest = self._bundle.manifest
        assert self._text is not None and manifest.text is not None, "checked before"
        vocabulary = Vocabulary(self._text.tokenizer, manifest.model.vocab_size, manifest.tokens.eos)
        return Grammars(vocabulary, dialect_in(manifest.text), manifest.text.thinking)
