"""Chat templates in jinja2's sandbox, as transformers runs them, with a limit on their output.

The sandbox does not limit time and memory, so safe mode runs no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
    """`{% generation %}`, which marks answers for training, has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
