"""Conversations with a script in place of a model: every answer is the same text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mars_export import GenerationConfig
from mars_export.runtime.cli.chat import Talk
from mars_export.runtime.session.conversation import Conversation
from support import tiny


def conversation_of(
    system: str | None = None, *, answer: str = "ok", capacity: int = 10_000, drop_oldest: bool = False
) -> tuple[Conversation, list[str]]:
    """A conversation, and the prompts that it has asked so far."""
    text, asked = tiny.text(tiny.tokenizer(), tiny.CHAT_TEMPLATE, None, "<|im_end|>"), list[str]()

    def ask(ids: list[int], _: GenerationConfig) -> Any:
        asked.append(text.spelled(ids))
        reply = SimpleNamespace(text=answer, token_ids=(5, tiny.IM_END), finish_reason="eos")
        return SimpleNamespace(completion=reply, is_over=True, failed=False, close=lambda: None)

    return Conversation(text, ask, capacity, system, drop_oldest=drop_oldest), asked


def talk_of(
    config: GenerationConfig | None = None, *, system: str | None = None, answer: str = "ok", **options: Any
) -> Talk:
    return Talk(conversation_of(system, answer=answer)[0], config or GenerationConfig(), **options)
