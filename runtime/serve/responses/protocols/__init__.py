"""The form of answers in each API."""

from collections.abc import Callable, Mapping

from ...requests.api_request import Kind
from ..admission import Admitted
from .anthropic import MessagesSerializer
from .completions import CompletionsSerializer
from .openai_responses import ResponsesSerializer
from .serializer import Serializer as Serializer

SERIALIZERS: Mapping[Kind, Callable[[Admitted], Serializer]] = {
    "chat": CompletionsSerializer,
    "text": CompletionsSerializer,
    "responses": ResponsesSerializer,
    "messages": MessagesSerializer,
}
