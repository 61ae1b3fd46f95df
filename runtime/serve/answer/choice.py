"""One answer of a request as it grows: text, calls, steps and its end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from ...batcher.request import Request
from ...decode.row import FinishReason
from ...session.answer import Event
from ...session.session import Session
from ...text.toolcalls import ToolCall, ToolStream
from ..ask.request import Ask
from .steps import AnswerStep, Steps

REASONS = {"eos": "stop", "stop": "stop"}
"""Other ends are "length"."""


@dataclass(slots=True)
class ToolCallEntry:
    """One call of a tool, with its id and its number in the answer."""

    id: str
    name: str
    arguments: str
    index: int

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Part = str | ToolCallEntry
"""A text or a call: the content of an answer is a list of them."""


@dataclass(slots=True)
class Piece:
    """The parts and steps that an event adds."""

    parts: list[Part] = field(default_factory=list)
    steps: list[AnswerStep] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls as `tool_calls` of a chunk."""
        calls = [part for part in self.parts if isinstance(part, ToolCallEntry)]
        return [call.to_dict() | {"index": call.index} for call in calls]


class Choice:
    """Collects the events of one request."""

    def __init__(self, index: int, request: Request, ask: Ask, session: Session) -> None:
        self.index, self.request = index, request
        self.reason: FinishReason | None = None
        self.parts: list[Part] = []  # no two texts in a row
        self.calls: list[ToolCallEntry] = []
        self.steps: list[AnswerStep] = []
        self.num_shown = 0  # characters of the text in earlier chunks
        self._reader: ToolStream | None = session.tool_stream() if ask.tools is not None else None
        self._once = ask.tools is not None and ask.tools.once
        self._steps = Steps(session.text) if ask.return_steps or ask.logprobs else None
        self._is_full = False

    @property
    def is_over(self) -> bool:
        return self.reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether it was ended after its only call (`parallel_tool_calls` false)."""
        return self._is_full

    @property
    def finish_reason(self) -> str:
        assert self.reason is not None, "the answer has not ended"
        if self.calls and (self._is_full or self.reason in REASONS):
            return "tool_calls"
        return REASONS.get(self.reason, "length")

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    def push(self, event: Event) -> Piece:
        """Add an event, and return the client's view of it."""
        piece = Piece()
        if self._steps is not None:
            piece.steps = self._steps.push(event)
        if not self._is_full:
            piece.parts = self._read(event)
        if self._is_full and not self.is_over:
            self.request.cancel()
        self.reason = event.finish_reason
        self.steps += piece.steps
        for part in piece.parts:
            if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
                self.parts[-1] += part
            else:
                self.parts.append(part)
        return piece

    def _read(self, event: Event) -> list[Part]:
        """The calls in an event and the text between them, up to the first call if only one is allowed."""
        if self._reader is None:
            return [event.text] if event.text else []
        items = self._reader.push(event.text)
        if event.finish_reason is not None:
            items += self._reader.finish()
        parts: list[Part] = []
        for item in items:
            if isinstance(item, str):
                parts.append(item)
                continue
            parts.append(self._called(item))
            if self._once:
                self._is_full = True
                break
        return parts

    def _called(self, call: ToolCall) -> ToolCallEntry:
        entry = ToolCallEntry(f"call_{secrets.token_hex(12)}", call.name, call.arguments, len(self.calls))
        self.calls.append(entry)
        return entry

    @property
    def message(self) -> dict[str, Any]:
        """The message of a chat answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.to_dict() for call in self.calls]
        return message
