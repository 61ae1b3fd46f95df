"""Which tokens came in which step, with the text of each. Their texts joined are the answer's."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from ...session.answer import Event
from ...text.tokenizer import Text, TextStream

LEAST = 1e-30  # a probability whose logarithm is written down

How = Literal["accepted", "verified", "forced"]


@dataclass(slots=True)
class Token:
    """`how` it came: verified (proposed, and held), forced (by a grammar), else accepted from the model."""

    id: int
    text: str
    p: float
    how: How

    def step_entry(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "p": round(self.p, 6), "how": self.how}

    def logprob_entry(self) -> dict[str, Any]:
        spelled = list(self.text.encode("utf-8", "replace"))
        return {"token": self.text, "logprob": self.logprob, "bytes": spelled, "top_logprobs": []}

    @property
    def logprob(self) -> float:
        return math.log(max(self.p, LEAST))


@dataclass(slots=True)
class Step:
    """`number` counts from 0; `end` is where its text ends in the answer's."""

    number: int
    tokens: list[Token]
    end: int

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.number, "tokens": [token.step_entry() for token in self.tokens]}


class Steps:
    """The steps of one answer. A step is handed out once all its text was shown."""

    def __init__(self, text: Text | None) -> None:
        self._stream = TextStream(text) if text is not None else None
        self._held: deque[Step] = deque()
        self._spelled = self._shown = self._num = 0

    def push(self, event: Event) -> list[Step]:
        """Take in an event; the steps that are complete now, all of them with the last event."""
        if event.token_ids:
            forced = set(event.forced)
            tokens = []
            for i, (token, p) in enumerate(zip(event.token_ids, event.confidences, strict=True)):
                how: How = "forced" if i in forced else "verified" if i < event.verified else "accepted"
                tokens.append(Token(token, self._spell(token), p, how))
            self._spelled += sum(len(token.text) for token in tokens)
            self._held.append(Step(self._num, tokens, self._spelled))
            self._num += 1
        self._shown += len(event.text)
        if event.finish_reason is not None:
            return self._rest()
        ready = []
        # The last step waits while its last token is a part of a character: an answer that ends there gets
        # what it is for that token's text.
        while (
            self._held
            and self._held[0].end <= self._shown
            and (self._held[0].tokens[-1].text or len(self._held) > 1)
        ):
            ready.append(self._held.popleft())
        return ready

    def _spell(self, token: int) -> str:
        if self._stream is None:
            return ""
        self._stream.push(token)
        return self._stream.read()

    def _rest(self) -> list[Step]:
        """What was held, its text cut where the answer ends: before a stop string."""
        rest = list(self._held)
        self._held.clear()
        if rest and self._stream is not None:
            tail = self._stream.finish()
            rest[-1].tokens[-1].text += tail
            self._spelled += len(tail)
        for token in reversed([token for step in rest for token in step.tokens]):
            excess = min(max(0, self._spelled - self._shown), len(token.text))
            token.text = token.text[: len(token.text) - excess]
            self._spelled -= excess
        return rest
