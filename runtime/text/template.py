"""Chat templates in jinja2's sandbox, as transformers runs them, with a limit on their output.

The sandbox does not limit time and memory, so safe mode runs no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Variables other than settings.
OWN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
MAX_TEXT = 64_000_000  # characters that a template renders


class Template:
    """A compiled chat template. Its constructor and `render` may raise any Exception."""

    def __init__(self, source: str) -> None:
        self._source, self._template = source, _ENVIRONMENT.from_string(source)

    @cached_property
    def settings(self) -> list[str]:
        """The variables of `chat_template_kwargs` that the template reads."""
        found = meta.find_undeclared_variables(_ENVIRONMENT.parse(self._source))
        return sorted(found - OWN - _ENVIRONMENT.globals.keys())

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(messages=messages, **values):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateError(f"its text has more than {MAX_TEXT} characters")
        return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False, cache_size=0
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
