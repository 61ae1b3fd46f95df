"""A model that wants a script: at most positions the script's next token, at others a drawn one. What it
wants at a position is the same whatever came before; C++ has its twin (runtime/cpp/tests/grammar_test.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mars_export.runtime.decode.backend import Cache, StepInput, StepOutput
from support.fake import FakeBackend
from support.makers import mix


class Scripted(FakeBackend):
    """`script`: the tokens that are wanted behind a prompt of `start` tokens. top_k 0: no such output."""

    def __init__(
        self,
        script: Sequence[int],
        start: int,
        vocab_size: int,
        seed: int,
        top_k: int,
        has_logits: bool,
        max_slots: int | None = None,
        max_capacity: int = 10**6,
    ) -> None:
        super().__init__(self.wanted, max_slots=max_slots, max_capacity=max_capacity)
        self.script, self.start, self.vocab_size = list(script), start, vocab_size
        self.seed, self.top_k, self.has_logits = seed, top_k, has_logits
        names = ("topk_ids", "topk_logprobs") if top_k else ()
        self.outputs = ("token_ids", "confidence", *names, *(("logits",) if has_logits else ()))

    def wanted(self, known: Sequence[int], masks: int) -> tuple[int, float]:
        """The token at the position behind them, and how sure it is."""
        at = len(known) + masks
        state = mix(self.seed ^ mix(at))
        place = at - self.start
        drawn = 1 + mix(state) % (self.vocab_size - 1)
        follows = 0 <= place < len(self.script) and state % 8 != 0
        confidence = 0.5 + (mix(state + masks) % 2**24) / 2**25
        return (self.script[place] if follows else drawn), confidence

    def likeliest(self, at: int, first: int, num: int) -> list[int]:
        found, i = [first], 0
        while len(found) < num:
            token = 1 + mix(self.seed ^ mix(at * 1000 + i)) % (self.vocab_size - 1)
            i += 1
            if token not in found:
                found.append(token)
        return found

    def logits(self, at: int, first: int) -> np.ndarray:
        """[vocab]; whole numbers, so that every language has them alike."""
        values = np.array(
            [mix(self.seed ^ mix(at * 4096 + token)) % 4096 for token in range(self.vocab_size)], np.float32
        )
        values[0] = -1.0
        for place, token in enumerate(self.likeliest(at, first, max(self.top_k, 1))):
            values[token] = 10_000.0 - place
        return values

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        plain = super().step(cache, first, inputs, False)
        positions = inputs.kv_length[:, None] + inputs.output_index + 1
        ids = logprobs = logits = None
        pairs = [
            (int(at), int(token)) for at, token in zip(positions.flat, plain.token_ids.flat, strict=True)
        ]
        if self.top_k:
            wide = (*positions.shape, self.top_k)
            ids = np.array([self.likeliest(at, t, self.top_k) for at, t in pairs], np.int64).reshape(wide)
            logprobs = np.broadcast_to(-np.arange(self.top_k, dtype=np.float32), wide)
        if want_logits:
            assert self.has_logits, "only what was exported is asked for"
            logits = np.stack([self.logits(at, t) for at, t in pairs]).reshape(*positions.shape, -1)
        return StepOutput(plain.token_ids, plain.confidence, None, None, logits, ids, logprobs)
