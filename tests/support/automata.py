"""Small random grammars over the tokens of a fake, a model that wants anything, and a slow decoder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from mars_export.runtime.decode.backend import Cache, StepInput, StepOutput
from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.structured.regular.automaton import Automaton as Language
from support import plain
from support.fake import FakeBackend

TOKENS = 11  # of the vocabulary: the mask, eight words, two ends
EOS = 9


class Automaton:
    """A matcher that walks a graph of states. A state with one edge that may not end forces its token.

    Runs are cut at `longest`, as a tokenizer may leave the end of a forced text open.
    """

    def __init__(
        self, edges: Sequence[dict[int, int]], ends: frozenset[int], longest: int, state: int = 0
    ) -> None:
        self.edges, self.ends, self.longest, self.state = edges, ends, longest, state

    def forced(self) -> list[int]:
        run, state = [], self.state
        while len(run) < self.longest and len(self.edges[state]) == 1 and state not in self.ends:
            [(token, state)] = self.edges[state].items()
            run.append(token)
        return run

    def mask(self) -> np.ndarray:
        mask = np.zeros(TOKENS, bool)
        mask[list(self.edges[self.state])] = True
        return mask

    def allows(self, token: int) -> bool:
        return token in self.edges[self.state]

    def likely(self) -> tuple[int, float] | None:
        """The smallest of those that may follow, in some states."""
        return (min(self.edges[self.state]), 0.8) if self.state % 3 == 2 and self.edges[self.state] else None

    def consume(self, token: int) -> None:
        self.state = self.edges[self.state][token]

    def copy(self) -> Automaton:
        return type(self)(self.edges, self.ends, self.longest, self.state)

    @property
    def may_end(self) -> bool:
        return self.state in self.ends

    @property
    def is_over(self) -> bool:
        return self.may_end and not self.edges[self.state]


def random_automaton(seed: int) -> Automaton:
    """No state without a way on or an end; about half of the states force."""
    draw = random.Random(seed)
    num = draw.randint(1, 8)
    edges, ends = [], set()
    for state in range(num):
        most = draw.choice((0, 1, 1, 1, 2, 3, 8))
        edges.append({token: draw.randrange(num) for token in draw.sample(range(1, EOS), most)})
        if not most or draw.random() < 0.25:
            ends.add(state)
    return Automaton(edges, frozenset(ends), draw.choice((1, 2, 5)))


def scores(known: Sequence[int], masks: int, seed: int) -> np.ndarray:
    """Logits [TOKENS] that depend on all that was seen. Every third context repeats what a mask would say."""
    at = len(known) + masks
    about = (tuple(known), masks) if crc32(repr((at, seed)).encode()) % 3 else at
    logits = np.random.default_rng(crc32(repr((about, seed)).encode())).permutation(TOKENS).astype(np.float32)
    logits[0] = -1e9
    return logits


class Scoring(FakeBackend):
    """A fake that has logits, or the k likeliest tokens, or both."""

    def __init__(self, seed: int, top_k: int, has_logits: bool, **limits: int | None) -> None:
        super().__init__(self._predict, **limits)  # type: ignore[arg-type]
        self.seed, self.top_k = seed, top_k
        wide = (("topk_ids", "topk_logprobs") if top_k else ()) + (("logits",) if has_logits else ())
        self.outputs = ("token_ids", "confidence", *wide)
        self.num_wide = 0  # steps of which logits were asked
        self._seen: list[np.ndarray] = []

    def _predict(self, known: tuple[int, ...], masks: int) -> tuple[int, float]:
        logits = scores(known, masks, self.seed)
        self._seen.append(logits)
        return int(logits.argmax()), float(np.exp(_logprobs(logits)).max())

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        self._seen = []
        output = super().step(cache, first, inputs, False)
        logits = np.stack(self._seen).reshape(*inputs.output_index.shape, TOKENS)
        logprobs = _logprobs(logits)
        best = np.argsort(-logits, axis=-1, kind="stable")[..., : self.top_k]
        self.num_wide += want_logits
        return StepOutput(
            output.token_ids,
            output.confidence,
            logits=logits if want_logits else None,
            topk_ids=best if self.top_k else None,
            topk_logprobs=np.take_along_axis(logprobs, best, -1) if self.top_k else None,
        )


def _logprobs(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def constrained(
    prompt: Sequence[int], matcher: Automaton | None, config: GenerationConfig, eos: Sequence[int], seed: int
) -> tuple[list[int], list[list[tuple[int, float]]], str]:
    """One token at a time: what is forced, else the best or drawn of the allowed tokens. Returns the answer,
    the most likely tokens at each position, and why it ended.
    """
    answer: list[int] = []
    tops: list[list[tuple[int, float]]] = []
    queue: list[int] = []
    while len(answer) < config.max_new_tokens:
        queue = queue or (matcher.forced() if matcher else [])
        if queue:
            token = queue.pop(0)
            tops.append([(token, 0.0)])
        elif matcher and matcher.is_over:
            if not eos:
                return answer, tops, "stop"
            token = min(eos)
            tops.append([(token, 0.0)])
        else:
            logits = plain.penalized(scores([*prompt, *answer], 0, seed), config, prompt, answer)
            tops.append(plain.top(logits, config.top_logprobs))
            if matcher:
                allowed = matcher.mask()
                allowed[list(eos)] = matcher.may_end
                logits = np.where(allowed, logits, np.float32(-np.inf))
            token = plain.pick(logits, config, len(prompt) + len(answer))
        answer.append(token)
        if token in eos:
            return answer, tops, "eos"
        if matcher:
            matcher.consume(token)
    return answer, tops, "stop" if matcher and not queue and not eos and matcher.is_over else "length"


def walk(language: Language, data: bytes, state: int = 0) -> int | None:
    """The state of an automaton over bytes after `data`; None if it does not allow them."""
    for byte in data:
        targets = [target for low, high, target in language.edges[state] if low <= byte <= high]
        if not targets:
            return None
        [state] = targets
    return state
