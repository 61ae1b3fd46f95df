"""Prompts as token ids: texts, messages, or token ids."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..bundle.open import Bundle
from ..errors import SessionError
from .dialects import Message

if TYPE_CHECKING:
    from .tokenizer import Text

MAX_OPENINGS = 16  # cached system messages and tools


@dataclass(frozen=True, slots=True)
class Chat:
    """The prompt of a chat: its messages, or their token ids.

    tools: functions in OpenAI's form, as JSON text, which the messages list if the config has none.
    template: variables of the chat template, such as `enable_thinking`.
    system: the system message of token ids, for the prefix cache.
    """

    messages: Sequence[Message] | Sequence[int]
    tools: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None

    def as_ids(self, ids: Sequence[int]) -> Chat:
        """The same prompt by its token ids."""
        return replace(self, messages=ids, system=self.system_message)

    @property
    def system_message(self) -> str | None:
        first: object = self.messages[0] if len(self.messages) else None
        if isinstance(first, Mapping) and first.get("role") == "system":
            return first["content"] if isinstance(first.get("content"), str) else None
        return self.system


Prompt = str | Sequence[Message] | Sequence[int] | Chat


def chat_of(prompt: Prompt) -> Chat | None:
    """The chat of a prompt; None for a text, and for token ids."""
    if isinstance(prompt, Chat):
        return prompt
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return Chat(prompt) if is_list and isinstance(prompt[0], Mapping) else None  # type: ignore


class Prompts:
    """Encodes prompts for a bundle with a context of `context` tokens. Without `text`, only token ids."""

    def __init__(self, bundle: Bundle, text: Text | None, context: int) -> None:
        self._bundle, self._text, self._context = bundle, text, context
        # First tokens of prompts, by system message and tools.
        self._openings: dict[tuple[str | None, str | None], list[int]] = {}

    def encode(self, prompt: Prompt, max_tokens: int | None) -> list[int]:
        """The token ids of a prompt. Raises SessionError as Session.encode does."""
        context, vocabulary = self._context, self._bundle.manifest.model.vocab_size
        max_tokens = context if max_tokens is None else min(max_tokens, context)
        tools, template = None, None
        content: Any = prompt
        if isinstance(prompt, Chat):
            tools, template, content = prompt.tools, prompt.template, prompt.messages
        if isinstance(content, bytes | bytearray | memoryview) or not isinstance(content, Sequence):
            content = _ids(content)
        is_ids = not isinstance(content, str) and (len(content) == 0 or not isinstance(content[0], Mapping))
        if not is_ids and self._text is None:
            raise SessionError(
                f"{self._bundle.path}: this bundle has no tokenizer; pass token ids instead of text"
            )
        if is_ids and len(content) <= max_tokens:
            wrong = [p for p in content if type(p) is bool or not isinstance(p, Integral)]
            if wrong:
                raise SessionError(f"token ids are integers, not {reprlib.repr(wrong[0])}", field="prompt")
        ids: Sequence[Any] = content if is_ids else self._text.encode(content, max_tokens, tools, template)  # type: ignore
        if not ids:
            raise SessionError("the prompt is empty; it needs at least one token", field="prompt")
        if len(ids) > max_tokens:
            is_all = max_tokens == context
            room = f"this bundle's context holds {context}" if is_all else f"{max_tokens} are allowed here"
            raise SessionError(
                f"the prompt has {len(ids)} tokens, {room}; shorten the prompt",
                code="context_length_exceeded",
                field="prompt",
            )
        if outside := [i for i in ids if not 0 <= i < vocabulary]:
            what = f"token ids outside the vocabulary of {vocabulary}: {outside[:5]}"
            raise SessionError(what, field="prompt")
        if (mask := self._bundle.manifest.tokens.mask) in ids:
            raise SessionError(
                f"the prompt holds the mask token {mask}, which marks a token that is not generated yet;"
                " remove it",
                field="prompt",
            )
        return [int(i) for i in ids]

    def marks(self, ids: list[int], system: str | None, tools: str | None = None) -> tuple[int, ...]:
        """The end of a prompt's system message and tools, if it has one of them."""
        key = system, tools
        if key == (None, None) or self._text is None:
            return ()
        opening = self._openings.get(key)
        if opening is None:
            try:
                opening = self._text.encode(_opening(system), None, tools)
            except SessionError:  # the template may refuse an empty user message
                opening = []
            if len(self._openings) >= MAX_OPENINGS:
                self._openings.clear()
            self._openings[key] = opening
        pairs = zip(ids, opening, strict=False)
        return (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),)


def _opening(system: str | None) -> list[Message]:
    """A prompt that shares only its system message with others."""
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": ""}]


def _ids(prompt: object) -> list[int]:
    """The token ids of an array. Raises SessionError for anything else."""
    with suppress(TypeError):
        if not isinstance(prompt, Mapping | bytes | bytearray | memoryview):
            return [operator.index(i) for i in prompt]  # type: ignore[attr-defined]
    raise SessionError(f"a prompt is a text, messages or token ids, not {type(prompt).__name__}")
