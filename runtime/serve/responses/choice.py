"""One answer of a request as it grows: text, calls, tokens with their texts, and its end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Any

from ...batcher.request import Request
from ...decode.event import Event, FinishReason
from ...session.session import Session
from ..requests.api_request import ApiRequest
from .tokens import Token, TokenStream

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
        tools = api_request.tools
        self._tool_stream = None if tools is None else session.tool_stream()
        may_think = api_request.kind != "text" and request.seq.next_config.may_think
        self._thinking = session.thinking_stream(request.prompt) if may_think else None
        self._once = tools is not None and tools.once
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
        if self._tool_stream is None:
            return [*parts, text] if text else parts
        items = self._tool_stream.push(text)
        if event.finish_reason is not None:
            items += self._tool_stream.finish(is_cut=event.finish_reason != "eos")
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
