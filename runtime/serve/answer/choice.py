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
    """One call of a tool, with its id."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Piece:
    """The text, calls and steps that an event adds."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    steps: list[AnswerStep] = field(default_factory=list)


class Choice:
    """Collects the events of one request."""

    def __init__(self, index: int, request: Request, ask: Ask, session: Session) -> None:
        self.index, self.request = index, request
        self.reason: FinishReason | None = None
        self.text, self.calls, self.steps = "", [], []  # type: tuple[str, list[ToolCallEntry], list[AnswerStep]]
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

    def push(self, event: Event) -> Piece:
        """Add an event, and return the client's view of it."""
        piece = Piece()
        if self._steps is not None:
            piece.steps = self._steps.push(event)
        if self._reader is None:
            piece.text = event.text
        elif not self._is_full:
            self._read(self._reader, event, piece)
        if self._is_full and not self.is_over:
            self.request.cancel()
        self.reason = event.finish_reason
        self.text += piece.text
        self.steps += piece.steps
        return piece

    def _read(self, reader: ToolStream, event: Event, piece: Piece) -> None:
        """Add calls and the text between them, up to the first call if only one is allowed."""
        items = reader.push(event.text)
        if event.finish_reason is not None:
            items += reader.finish()
        for item in items:
            if isinstance(item, ToolCall):
                call = ToolCallEntry(f"call_{secrets.token_hex(12)}", item.name, item.arguments)
                piece.calls.append(call.to_dict() | {"index": len(self.calls)})
                self.calls.append(call)
                if self._once:
                    self._is_full = True
                    return
            else:
                piece.text += item

    @property
    def message(self) -> dict[str, Any]:
        """The message of a chat answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.to_dict() for call in self.calls]
        return message
