"""Chat templates in jinja2's sandbox, and special tokens of messages as plain text.

The sandbox does not limit time and memory, so safe mode runs no template; only the output is limited.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
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
        self._hidden = re.compile(f"-{self._secret}-([0-9]+)-")

    def hide(self, value: Any, kept: Collection[str] = ()) -> Any:
        """A message or a tool with its special tokens hidden, also those in the keys of objects. Of a text,
        the tokens `kept` are not hidden.
        """
        if isinstance(value, str):
            return self._pattern.sub(lambda m: m[0] if m[0] in kept else self._name("-", m[0]), value)
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
        """In characters that no template escapes."""
        return f"{kind}{self._secret}{kind}{self._numbers[special]}{kind}"

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


# Variables other than settings.
TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
OWN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", *TOKENS}
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thinking
MAX_TEXT = 64_000_000  # characters that a template renders


class Template:
    """A compiled chat template. Its constructor and `render` may raise any Exception."""

    def __init__(self, source: str) -> None:
        self._source, self._template = source, _ENVIRONMENT.from_string(source)

    @cached_property
    def _variables(self) -> set[str]:
        return meta.find_undeclared_variables(_ENVIRONMENT.parse(self._source))

    @property
    def settings(self) -> set[str]:
        """The variables of `chat_template_kwargs` that the template reads."""
        return self._variables - OWN - _ENVIRONMENT.globals.keys()

    @property
    def takes_tools(self) -> bool:
        return "tools" in self._variables

    @property
    def takes_calls(self) -> bool:
        """Whether it writes the `tool_calls` of messages."""
        return "tool_calls" in self._source

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **values: Any
    ) -> str:
        pieces, size = [], 0
        values |= {"documents": None, "add_generation_prompt": True}
        for piece in self._template.generate(messages=[*map(_message, messages)], tools=tools, **values):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateError(f"its text has more than {MAX_TEXT} characters")
        return "".join(pieces)


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose thinking has the names that templates read."""
    thinking = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thinking is None else {"thinking": thinking, **message, "reasoning_content": thinking}


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training, has a scope of its own and no other effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
        optimized=False,
        cache_size=0,
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers; jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(str(message)[:2000])


_ENVIRONMENT = _environment()
