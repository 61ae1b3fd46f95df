"""The form of a reply in each protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...ask.request import Kind
from ..admission import Admitted
from ..choice import Choice, Piece
from .anthropic import MessagesReply
from .completions import CompletionsReply
from .responses import ResponsesReply


class Reply(Protocol):
    """The answers to one ask."""

    id: str
    admitted: Admitted
    choices: list[Choice]

    @property
    def is_over(self) -> bool: ...

    def body(self) -> dict[str, Any]:
        """The body of a finished reply."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream."""
        ...

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """The chunks for an event; the last ones at the end."""
        ...


REPLIES: Mapping[Kind, Callable[[Admitted], Reply]] = {
    "chat": CompletionsReply,
    "text": CompletionsReply,
    "responses": ResponsesReply,
    "messages": MessagesReply,
}
