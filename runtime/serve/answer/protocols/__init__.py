"""The form of answers in each API."""

from collections.abc import Callable, Mapping

from ...ask.request import Kind
from ..admission import Admitted
from .anthropic import MessagesReply
from .completions import CompletionsReply
from .reply import Reply
from .responses import ResponsesReply

REPLIES: Mapping[Kind, Callable[[Admitted], Reply]] = {
    "chat": CompletionsReply,
    "text": CompletionsReply,
    "responses": ResponsesReply,
    "messages": MessagesReply,
}
