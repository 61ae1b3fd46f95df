"""The tokens of an answer with their texts and probabilities, for clients that ask for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ...decode.event import Event
from ...decode.sample import Top
from ...text.tokenizer import Text

LEAST = 1e-30  # lowest probability for a logarithm

How = Literal["accepted", "verified", "forced"]


@dataclass(slots=True)
class Token:
    """A token of step number `step`, from 0. `how` it was chosen: verified (a draft token), forced (by a
    grammar), else accepted. `top`: the most likely tokens at its position: ids, texts and log-probabilities.
    `is_thinking`: whether it is a part of the thinking or its marks.
    """

    id: int
    text: str
    p: float
    step: int
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


class TokenStream:
    """The tokens of a growing answer. Those of a step are returned when all of their text was returned."""

    def __init__(self, text: Text | None) -> None:
        self._text, self._last = text, list[int]()  # and the last token, if there is one
        self._held: list[Token] = []
        self._num_steps = 0
        self._spelled = self._shown = 0  # characters of all tokens, and of the answer

    def push(self, event: Event) -> list[Token]:
        """Add an event, and return the tokens of complete steps; with the last event all of them."""
        if event.token_ids:
            self._held += [self._token(event, i) for i in range(len(event.token_ids))]
            self._num_steps += 1
            self._spelled += sum(map(len, event.texts))
        self._shown += len(event.text)
        if event.finish_reason is not None:
            self._fit(event.text)
            num_ready = len(self._held)
        else:
            num_ready = self._num_ready()
        ready, self._held = self._held[:num_ready], self._held[num_ready:]
        return ready

    def _token(self, event: Event, i: int) -> Token:
        is_verified = i < event.accepted_draft_tokens
        how: How = "forced" if i in event.forced else "verified" if is_verified else "accepted"
        top = self._alternatives(event.top_logprobs[i]) if event.top_logprobs else []
        token = event.token_ids[i]
        self._last = [token]
        return Token(token, event.texts[i], event.confidences[i], self._num_steps, how, top)

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

    def _num_ready(self) -> int:
        """The number of held tokens whose steps are complete."""
        held, end = self._held, self._spelled  # of the text of the first i tokens
        for i in range(len(held), 0, -1):
            is_last = i == len(held)
            # The last step waits while its last token has only a part of a character: if the answer ends
            # there, that token gets the rest of the text.
            is_whole = held[-1].text if is_last else held[i].step != held[i - 1].step
            if is_whole and end <= self._shown:
                return i
            end -= len(held[i - 1].text)
        return 0

    def _fit(self, text: str) -> None:
        """At the end of the answer, whose last text is `text`: the last token gets the rest of an incomplete
        character, and no token has text from a stop string on.
        """
        if self._held and self._shown > self._spelled:
            self._held[-1].text += text[self._spelled - self._shown :]
        excess = self._spelled - self._shown
        for token in reversed(self._held):
            if excess <= 0:
                return
            cut = min(excess, len(token.text))
            token.text, excess = token.text[: len(token.text) - cut], excess - cut
