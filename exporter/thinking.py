"""Recognizes the marks around thinking in a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer

from ..runtime.bundle.turns import ThinkingMarks
from .checkpoint.vocabulary import Vocabulary

KNOWN = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def find_thinking(vocabulary: Vocabulary) -> ThinkingMarks | None:
    """The marks that the template has, if they are part of an answer's text; special tokens are not."""
    added = Tokenizer.from_str(vocabulary.tokenizer_json).get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    template = vocabulary.chat_template or ""
    for marks in KNOWN:
        if all(mark in template for mark in marks) and special.isdisjoint(marks):
            return ThinkingMarks(*marks)
    return None
