"""Special tokens in what users write are text; those that a chat template writes are tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer


class PlainText:
    """Stands names that nobody can guess in for special tokens: in messages before the template is rendered,
    and in the template's own text after it. What the template does with other text stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in tokens if token.special]
        self._numbers = {text: number for number, text in enumerate(self._special)}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._secret = secrets.token_hex(8)
        self._hidden = re.compile(f"\ue000{self._secret}-([0-9]+)\ue001")

    def hide(self, value: Any) -> Any:
        """A message, or what tools say, with special tokens out of sight."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._name("-", match[0]), value)
        if isinstance(value, Mapping):
            return {key: self.hide(inner) for key, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def holds(self, text: str) -> bool:
        """Whether something is hidden in a text."""
        return self._secret in text

    def show(self, text: str) -> str:
        """The text as it was written."""
        return self._hidden.sub(lambda match: self._special[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text: what is hidden is text."""
        named = self._pattern.sub(lambda match: self._name("+", match[0]), text)
        return list(self._renamed.encode(self.show(named), add_special_tokens=False).ids)

    def _name(self, kind: str, special: str) -> str:
        return f"\ue000{self._secret}{kind}{self._numbers[special]}\ue001"

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer, its special tokens under names of the template's own."""

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
        if "merges" in model:  # text may not become a special token by them either
            names = self._numbers.keys()
            model["merges"] = [pair for pair in model["merges"] if names.isdisjoint([*pair, "".join(pair)])]
        if model.get("unk_token") is not None:
            model["unk_token"] = name(model["unk_token"])
        return Tokenizer.from_str(json.dumps(data))
