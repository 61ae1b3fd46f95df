"""The filters, helpers and functions that a chat template may call, each paid for. Knows jinja2's, and their
quirks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, pass_context

from .budget import (
    DEEPEST,
    ENTRY,
    REFERRED,
    TooMuch,
    counted,
    current,
    one_by_one,
    pay_for_method,
    pay_for_printf,
    within,
)

LONGEST_MESSAGE = 2000


def names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# Of jinja2's filters those that chat templates use.
FILTERS = names(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int"
    " items join last length list lower map max min reject rejectattr replace reverse round safe"
    " select selectattr sort string sum title tojson trim truncate unique upper wordcount"
)
TEXTUAL = names("capitalize indent lower title trim truncate upper wordcount")  # make text of any value
COLLECTING = names("dictsort groupby items list reverse sort unique")  # make containers


@pass_context
def output(_: Any, value: Any) -> Any:
    """Every piece of text passes here.

    Asks for the context, so that jinja2 computes no text when it compiles.
    """
    current.get().spend_on(value)
    return value


def _joined(parts: Sequence[Any]) -> str:
    current.get().spend_on(parts)
    return "".join(map(str, parts))


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    part = value[start:stop:step]
    if isinstance(part, str):
        current.get().spend(len(part))
    else:
        current.get().spend_on(part, REFERRED)
    return part


def _made(value: Any) -> Any:
    current.get().spend_on(value, REFERRED)
    return value


def paid_for(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what goes in, as far as it is copied, and for what comes out."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget, value = current.get(), args[first]
        budget.spend(5 * len(value) if isinstance(value, str) else ENTRY)
        if name in TEXTUAL and not isinstance(value, str):
            budget.spend_on(value)
        if name in COLLECTING and isinstance(value, str):
            budget.spend(ENTRY * len(value))
        result = function(*args, **kwargs)
        if name in COLLECTING:
            result = result if isinstance(result, str | list | dict | tuple) else list(one_by_one(result, 0))
            budget.spend_on(result, REFERRED)
        elif isinstance(result, str):
            budget.spend(len(result))
        return result

    return paid


def _string(value: Any) -> Any:
    if isinstance(value, str):
        return value
    current.get().spend_on(value)
    return str(value)


def _escape(value: Any) -> str:
    text = str(_string(value))
    for plain, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text.replace(plain, safe)
    return text


@pass_context
def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = context.environment.filters["map"](context, value, attribute=attribute)
    parts = list(counted(value, 0))
    for part in parts:
        current.get().spend_on(part)
    current.get().spend(len(parts) * len(str(_string(d))))
    return str(d).join(map(str, parts))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(_string(part)) for part in (value, old, new))
    args = (old, new) if count is None else (old, new, count)
    return text.replace(*pay_for_method(current.get(), text, "replace", args))


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = " " * within(width) if isinstance(width, int) else str(width)
    text = str(_string(value)) + "\n"  # this quirk of jinja2 is necessary for splitlines
    current.get().spend(len(margin) * (text.count("\n") + 1) + ENTRY * text.count("\n"))
    lines = text.splitlines()
    head, rest = lines[0], lines[1:]
    if blank:
        body = ("\n" + margin).join(lines)
    else:
        body = "\n".join([head, *(margin + line if line else line for line in rest)])
    return margin + body if first else body


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    precision = within(int(precision))
    if method == "common":
        return round(value, precision)
    if method not in ("ceil", "floor"):
        raise TemplateError("round knows common, ceil and floor")
    return getattr(math, method)(value * 10**precision) / 10**precision


@pass_context
def _sum(context: Any, value: Iterable[Any], attribute: Any = None, start: float = 0) -> float:
    if attribute is not None:
        value = context.environment.filters["map"](context, value, attribute=attribute)
    if not isinstance(start, int | float):
        raise TemplateError("sum is for numbers")
    return sum(counted(value, 0), start)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TemplateError("format takes positional or named arguments, not both")
    text = str(value)
    pay_for_printf(current.get(), text, kwargs or args)
    return text % (kwargs or args)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    deep = DEEPEST * within(indent) if indent is not None and indent > 0 else 0
    budget = current.get()
    before = budget.left
    budget.spend_on(value)
    budget.spend(
        (before - budget.left) * (6 if ensure_ascii else 2) + (before - budget.left) // ENTRY * deep // 8
    )
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def refuse(message: Any) -> None:
    raise TemplateError(str(_string(message))[:LONGEST_MESSAGE])


def strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"%[-_0^#+]*\d", form):
        raise TooMuch("a date takes a plain format")
    return datetime.now().strftime(form)


OURS: dict[str, Callable[..., Any]] = {
    "e": _escape, "escape": _escape, "format": _format, "indent": _indent, "join": _join, "replace": _replace,
    "round": _round, "safe": _string, "string": _string, "sum": _sum, "tojson": _tojson,
}  # fmt: skip
HELPERS = {"counted:": counted, "joined:": _joined, "sliced:": _sliced, "made:": _made}
