"""Typed reading of a body's fields. Fields that are left over at the end are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ..refusals import Refused

T = TypeVar("T")

# Fields of OpenAI's API and others that do not change the answer. They are ignored.
HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "request_id", "timings_per_token", "priority"),
    )
)
# Unsupported fields that would change the answer, with the values that would not.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "functions": (),
    "function_call": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "stop_token_ids": ([],),
    "typical_p": (1,),
    "mirostat": (0,),
    "skip_special_tokens": (True,),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}


class BodyFields:
    """The fields of a body that are not null."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def any(self, name: str) -> Any:
        """The value of `name`, or None."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a text")

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool, "true or false")

    def number(self, name: str) -> float | None:
        value = self.any(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise wrong(name, "a number", value)
        return value

    def integer(self, name: str) -> int | None:
        return self._typed(name, int, "an integer")

    def object(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, dict, "an object")

    def list(self, name: str) -> list[Any] | None:
        return self._typed(name, list, "a list")

    def texts(self, name: str) -> tuple[str, ...] | None:
        """One text or a list of them."""
        value = self.any(name)
        if value is None:
            return None
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise wrong(name, "a text or a list of texts", value)
        return tuple(texts)

    def finish(self) -> None:
        """Refuse unread fields, except harmless ones."""
        for name, value in self._left.items():
            if name in HARMLESS:
                continue
            if name not in NEUTRAL:
                raise Refused(
                    400, f"unknown field {name[:60]!r}; remove it, or correct its name", param=name[:60]
                )
            if not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
                neutral = f" (except {json.dumps(NEUTRAL[name][0])})" if NEUTRAL[name] else ""
                raise Refused(
                    400,
                    f"{name} is not supported{neutral} and would change the answer; remove it",
                    param=name,
                    code="unsupported_parameter",
                )

    def _typed(self, name: str, kind: type[T], what: str) -> T | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise wrong(name, what, value)
        return value


def wrong(name: str, what: str, value: object) -> Refused:
    return Refused(400, f"{name} must be {what}, not {shown(value)}", param=name)


def shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:80]


def _is_same(value: object, neutral: object) -> bool:
    """Equality, in which 0 differs from False."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
