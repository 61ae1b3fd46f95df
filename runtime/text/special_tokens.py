"""Keeping special tokens in messages plain text, while those of the chat template become tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer


class PlainText:
    """Replaces special tokens, and `control_tokens`, by secret names: those in messages before the template
    is rendered, and those of the template afterwards. The template treats all other text as before.
    """

    def __init__(self, tokenizer: Tokenizer, control_tokens: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.get_added_tokens_decoder().values()
        self._special = [
            token.content for token in tokens if token.special or token.content in control_tokens
        ]
        self._numbers = {text: number for number, text in enumerate(self._special)}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._secret = secrets.token_hex(8)
        self._hidden = re.compile(f"\ue000{self._secret}-([0-9]+)\ue001")

    def hide(self, value: Any) -> Any:
        """A message or a tool with its special tokens hidden, also those in the keys of objects."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._name("-", match[0]), value)
        if isinstance(value, Mapping):
            return {
                self.hide(key) if isinstance(key, str) else key: self.hide(inner)
                for key, inner in value.items()
            }
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def holds(self, text: str) -> bool:
        """Whether a text has hidden special tokens."""
        return self._secret in text

    def show(self, text: str) -> str:
        """The original text."""
        return self._hidden.sub(lambda match: self._special[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, in which hidden special tokens are plain text."""
        renamed = self._pattern.sub(lambda match: self._name("+", match[0]), text)
        return list(self._renamed.encode(self.show(renamed), add_special_tokens=False).ids)

    def prepare(self) -> None:
        """Build the second tokenizer."""
        self._renamed  # noqa: B018

    def _name(self, kind: str, special: str) -> str:
        return f"\ue000{self._secret}{kind}{self._numbers[special]}\ue001"

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer with secret names for its special tokens."""

        def name(text: Any) -> Any:
            return self._name("+", text) if text in self._numbers else text

        data = json.loads(self._tokenizer.to_str())
        data["post_processor"] = data["truncation"] = data["padding"] = None
        for token in data["added_tokens"]:
            token["content"] = name(token["content"])
        model = data["model"]
        vocabulary = model.get("vocab", {})
        if isinstance(vocabulary, dict):
            model["vocab"] = {name(text): number for text, number in vocabulary.items()}
        else:
            model["vocab"] = [[name(text), score] for text, score in vocabulary]
        if "merges" in model:  # merges must not make special tokens of text either
            names = self._numbers.keys()
            model["merges"] = [pair for pair in model["merges"] if names.isdisjoint([*pair, "".join(pair)])]
        if model.get("unk_token") is not None:
            model["unk_token"] = name(model["unk_token"])
        return Tokenizer.from_str(json.dumps(data))
