"""The tokens of each step with their texts. Joined, these texts are the answer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from ...decode.sample import Top
from ...session.answer import Event
from ...text.tokenizer import Text

LEAST = 1e-30  # lowest probability for a logarithm

How = Literal["accepted", "verified", "forced"]


@dataclass(slots=True)
class Token:
    """`how` it was chosen: verified (a draft token), forced (by a grammar), else accepted. `top`: the most
    likely tokens at its position: ids, texts and log-probabilities. `is_thinking`: whether it is a part
    of the thinking or its marks.
    """

    id: int
    text: str
    p: float
    how: How
    top: list[tuple[int, str, float]]
    is_thinking: bool = False

    def step_entry(self) -> dict[str, Any]:
        entry = {"id": self.id, "text": self.text, "p": round(self.p, 6), "how": self.how}
        return entry | {"thinking": True} if self.is_thinking else entry

    def logprob_entry(self) -> dict[str, Any]:
        return _entry(self.text, self.logprob) | {"top_logprobs": [_entry(*each) for each in self.likely]}

    @property
    def likely(self) -> list[tuple[str, float]]:
        """Texts and log-probabilities of the most likely tokens; this one has the text of the answer."""
        return [(self.text if token == self.id else text, p) for token, text, p in self.top]

    @property
    def logprob(self) -> float:
        return math.log(max(self.p, LEAST))


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


@dataclass(slots=True)
class Step:
    """`number` counts from 0; `end` is the end of its text in the answer."""

    number: int
    tokens: list[Token]
    end: int

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.number, "tokens": [token.step_entry() for token in self.tokens]}


class Steps:
    """The steps of one answer. A step is returned when all of its text was returned."""

    def __init__(self, text: Text | None) -> None:
        self._text, self._last = text, list[int]()  # and the last token, if there is one
        self._pending: deque[Step] = deque()
        self._spelled = self._shown = self._num = 0  # characters of tokens and of the answer, and steps

    def push(self, event: Event) -> list[Step]:
        """Add an event, and return the complete steps; with the last event all of them."""
        if event.token_ids:
            forced = set(event.forced)
            tokens = []
            parts = zip(event.token_ids, event.texts, event.confidences, strict=True)
            for i, (token, text, p) in enumerate(parts):
                how: How = (
                    "forced" if i in forced else "verified" if i < event.accepted_draft_tokens else "accepted"
                )
                top = self._alternatives(event.top_logprobs[i]) if event.top_logprobs else []
                tokens.append(Token(token, text, p, how, top))
                self._last = [token]
            self._spelled += sum(map(len, event.texts))
            self._pending.append(Step(self._num, tokens, self._spelled))
            self._num += 1
        self._shown += len(event.text)
        if event.finish_reason is not None:
            return self._rest(event.text)
        ready = []
        # A last step waits while its last token has only a part of a character: if the answer ends there,
        # that token gets the rest of the text.
        while (
            self._pending
            and self._pending[0].end <= self._shown
            and (self._pending[0].tokens[-1].text or len(self._pending) > 1)
        ):
            ready.append(self._pending.popleft())
        return ready

    def _alternatives(self, top: Top) -> list[tuple[int, str, float]]:
        """Tokens with their texts after the last one: some tokenizers omit white space at the beginning."""
        if self._text is None:
            return []
        spelled, before = self._text.spelled, self._text.spelled(self._last)
        texts = [(token, spelled([*self._last, token]), p) for token, p in top]
        return [
            (token, text[len(before) :] if text.startswith(before) else spelled([token]), p)
            for token, text, p in texts
        ]

    def _rest(self, text: str) -> list[Step]:
        """The pending steps, with the rest of an incomplete character at the end of the last `text`, and
        without text after the end of the answer (from a stop string on).
        """
        rest = list(self._pending)
        self._pending.clear()
        if rest and self._shown > self._spelled:
            rest[-1].tokens[-1].text += text[self._spelled - self._shown :]
            self._spelled = self._shown
        for token in reversed([token for step in rest for token in step.tokens]):
            excess = min(max(0, self._spelled - self._shown), len(token.text))
            token.text = token.text[: len(token.text) - excess]
            self._spelled -= excess
        return rest
