"""One answer of a request as it grows: text, calls, tokens with their texts, and its end."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Any, Literal

from ...batcher.request import Request
from ...decode.event import Event, FinishReason
from ...decode.sample import Top
from ...session.session import Session
from ...text.tokenizer import Text
from ...text.toolcalls import ToolStream
from ..requests.api_request import ApiRequest

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


REASONS = {"eos": "stop", "stop": "stop"}
"""Other ends are "length"."""


def _new_id() -> str:
    """The id of a call: nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


@dataclass(slots=True)
class ToolCallEntry:
    """One call of a tool, with its id."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str


Part = str | Reasoning | ToolCallEntry
"""A text, thinking or a call: the content of an answer is a list of them."""


@dataclass(slots=True)
class Delta:
    """An event's addition to an answer, as a client sees it: parts, and tokens if the client asks for them.
    No two texts follow each other, and no two pieces of thinking.
    """

    parts: list[Part] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str) and isinstance(last, str):
            self.parts[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            self.parts[-1] = Reasoning(last.text + part.text)
        else:
            self.parts.append(part)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[ToolCallEntry]:
        return [part for part in self.parts if isinstance(part, ToolCallEntry)]


class Choice(Delta):
    """The whole answer to one request, made from its events."""

    def __init__(self, index: int, request: Request, api_request: ApiRequest, session: Session) -> None:
        super().__init__()
        self.index, self.request = index, request
        self.reason: FinishReason | None = None
        self.num_returned = 0  # characters of the tokens in earlier chunks
        self._reader: ToolStream | None = session.tool_stream() if api_request.tools is not None else None
        self._thinking = session.thinking_stream(request.prompt) if api_request.may_think else None
        self._once = api_request.tools is not None and api_request.tools.once
        self._unmarked: list[Token] = []  # until it is known whether the answer begins with thinking
        self._num_spelled = 0  # characters of the marked tokens
        self._shows_tokens = api_request.return_steps or api_request.logprobs
        is_counted = self._shows_tokens or self._thinking is not None
        self._stream = TokenStream(session.text) if is_counted else None
        self.num_thinking = 0  # tokens
        self.is_full = False  # ended after its only call (`parallel_tool_calls` false)

    @property
    def is_over(self) -> bool:
        return self.reason is not None

    @property
    def finish_reason(self) -> str:
        assert self.reason is not None, "the answer has not ended"
        if self.calls and (self.is_full or self.reason in REASONS):
            return "tool_calls"
        return REASONS.get(self.reason, "length")

    def push(self, event: Event) -> Delta:
        """Add an event, and return the client's view of it."""
        delta = Delta()
        tokens = self._stream.push(event) if self._stream is not None else []
        if not self.is_full:
            delta.parts = self._read(event)
        if self.is_full and not self.is_over:
            self.request.cancel()
        self.reason = event.finish_reason
        self._mark_thinking(tokens)
        if self._shows_tokens:
            delta.tokens = tokens
            self.tokens += tokens
        for part in delta.parts:
            self.add(part)
        return delta

    def _read(self, event: Event) -> list[Part]:
        """The thinking and the calls in an event and the text between them, up to the first call if only one
        is allowed.
        """
        parts, text = self._think(event)
        if self._reader is None:
            return [*parts, text] if text else parts
        items = self._reader.push(text)
        if event.finish_reason is not None:
            items += self._reader.finish(is_cut=event.finish_reason != "eos")
        for item in items:
            if isinstance(item, str):
                parts.append(item)
            else:
                parts.append(ToolCallEntry(_new_id(), item.name, item.arguments))
                if self._once:
                    self.is_full = True
                    break
        return parts

    def _think(self, event: Event) -> tuple[list[Part], str]:
        """The thinking in an event, and the text after it."""
        if self._thinking is None:
            return [], event.text
        thinking, text = self._thinking.push(event.text)
        if event.finish_reason is not None:
            more, rest = self._thinking.finish()
            thinking, text = thinking + more, text + rest
        return [Reasoning(thinking)] if thinking else [], text

    def _mark_thinking(self, tokens: list[Token]) -> None:
        self._unmarked += tokens
        if self._thinking is not None and self._thinking.is_undecided and not self.is_over:
            for token in self._unmarked:  # a part of the opening mark, most likely
                token.is_thinking = True
            return
        for token in self._unmarked:
            token.is_thinking = self._thinking is not None and self._num_spelled < self._thinking.num_thinking
            self._num_spelled += len(token.text)
            self.num_thinking += token.is_thinking
        self._unmarked = []

    @property
    def message(self) -> dict[str, Any]:
        """The message of a chat answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.to_dict() for call in self.calls]
        return message
