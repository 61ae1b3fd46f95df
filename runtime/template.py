"""Chat templates of other people: jinja2 in a sandbox with a budget.

The only file that knows jinja2; knows no tokens.

A template may reach nothing outside, and what it computes is paid from a budget of work before it is
computed: characters and list entries that come into being, and steps of loops. What may be said in a template
follows from that: expressions become calls of ours when it is compiled, nothing is computed then, and of
jinja2's filters those are left that chat templates use.
"""

from __future__ import annotations

import json
import math
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_SOURCE = 500_000  # characters of a template
WORK, WORK_PER_CHARACTER, MOST_WORK, SECONDS = 20_000_000, 64, 400_000_000, 4.0
ENTRY = 8  # what a list entry or a step of a loop costs, in characters
DEEPEST, WIDEST, LONGEST_POWER, LONGEST_MESSAGE = 100, 10_000, 4096, 2000


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# Of jinja2's filters those that chat templates use.
FILTERS = _names(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int"
    " items join last length list lower map max min reject rejectattr replace reverse round safe"
    " select selectattr sort string sum title tojson trim truncate unique upper wordcount"
)
TEXTUAL = _names("capitalize indent lower title trim truncate upper wordcount")  # make text of any value
COLLECTING = _names("dictsort groupby items list reverse sort unique")  # make containers
METHODS: Mapping[type, tuple[str, ...]] = {
    str: _names(
        "capitalize casefold center count endswith find format format_map index isalnum isalpha"
        " isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper"
        " join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust"
        " rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
    ),
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
    float: _names("is_integer"),
}
PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


class TooMuch(TemplateError):
    """The template asks for more than its budget."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still do."""

    left: int
    end: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def spend(self, work: int) -> None:
        self.left -= work + 1
        if self.left < 0 or time.monotonic() > self.end:
            raise TooMuch("it makes more text or takes more steps than these messages can need")

    def spend_on(self, value: Any, share: int = 1, depth: int = 0) -> None:
        """Pay for all that a value holds; for strings a part of their length where they are only
        referred to.
        """
        if isinstance(value, str):
            self.spend(len(value) // share)
        elif isinstance(value, int):
            self.spend(value.bit_length() // 3)
        elif isinstance(value, list | tuple | dict):
            if depth > DEEPEST:
                raise TooMuch(f"it nests values more than {DEEPEST} deep")
            self.spend(ENTRY * len(value))
            entries = chain.from_iterable(value.items()) if isinstance(value, dict) else value
            for entry in entries:
                self.spend_on(entry, share, depth + 1)
        elif isinstance(value, Namespace):
            raise SecurityError("a namespace is not text")
        else:
            self.spend(ENTRY)


_budget: ContextVar[Budget] = ContextVar("budget")
REFERRED = 16  # the share of a string's length that a reference to it costs


class Template:
    """A chat template, compiled.

    Raises TemplateError or what else a program can raise, when it is made and when it renders.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MOST_SOURCE:
            raise TooMuch(f"it has {len(source)} characters, at most {MOST_SOURCE} are taken")
        self._template = _ENVIRONMENT.from_string(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        contents = (m.get("content") for m in messages)
        size = sum(len(c) if isinstance(c, str) else len(repr(c)) for c in contents)
        size += len(repr(values["tools"])) if "tools" in values else 0
        # A template that puts its text together message by message copies each as often as there are
        # messages.
        work = WORK + (WORK_PER_CHARACTER + len(messages)) * size
        token = _budget.set(Budget(min(work, MOST_WORK)))
        try:
            return self._template.render(messages=messages, **values)
        finally:
            _budget.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            optimized=False,
            finalize=_output,
            cache_size=0,
        )
        chosen = {name: self.filters[name] for name in FILTERS} | OURS
        self.filters = {name: _paid(name, function) for name, function in chosen.items()} | HELPERS
        kept = ("cycler", "dict", "joiner", "namespace", "range")
        self.globals = {name: self.globals[name] for name in kept}
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Paying().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 1) > LONGEST_POWER:
                raise TooMuch("a power is too large")
        elif operator == "*":
            _pay_for_product(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            _pay_for_printf(budget, left, right)
        else:
            for side in (left, right):
                budget.spend_on(side, 1 if isinstance(side, str) else REFERRED)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @wraps(formatted)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _pay_for_format(_budget.get(), value.__self__, (args, kwargs))
            return formatted(*args, **kwargs)

        return bounded

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget, owner = _budget.get(), getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "?")
        kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
        if kind is None and (
            isinstance(owner, int | float | bytes | type) or getattr(obj, "__objclass__", None)
        ):
            raise SecurityError(f"{name} is not offered to chat templates")
        if kind is not None:
            if name not in METHODS[kind]:
                raise SecurityError(f"{kind.__name__}.{name} is not offered to chat templates")
            args = _pay_for_method(budget, owner, name, args)
        else:
            budget.spend_on([*args, *(v for k, v in kwargs.items() if not k.startswith("_"))], REFERRED)
            if isinstance(obj, Macro):
                budget.spend(MACRO)
            if isinstance(obj, LoopContext) and args:
                args = (_counted(args[0], MACRO), *args[1:])
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, Sized) and not isinstance(result, Undefined):
            budget.spend(len(result) if isinstance(result, str) else ENTRY * len(result))
        return result


MACRO = 500  # what a call of a template's own macro costs beside what it does


class _Paying(NodeTransformer):
    """Puts our filters where jinja2's own code would work unseen: text, loops, `~`, slices, lists and
    dictionaries.
    """

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        step = sum(1 for inner in node.body for _ in inner.find_all(nodes.Node))
        self.generic_visit(node)
        node.iter = _call(node.iter, "counted:", nodes.Const(step))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _call(nodes.Tuple(node.nodes, "load"), "joined:")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _call(node.node, "sliced:", *(end or nodes.Const(None) for end in ends))

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _call(node, "made:")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _call(node, "made:")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _call(node, "made:") if node.ctx == "load" else node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateError(f"line {node.lineno}: autoescape is not for chat templates")


def _call(value: Any, name: str, *args: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


@pass_context
def _output(_: Any, value: Any) -> Any:
    """Every piece of text passes here.

    Asks for the context, so that jinja2 computes no text when it compiles.
    """
    _budget.get().spend_on(value)
    return value


def _counted(value: Any, step: int) -> Iterable[Any]:
    """What a loop goes through, each step paid for: at once where the number of steps is known."""
    if isinstance(value, Sized):
        _budget.get().spend((ENTRY + step) * len(value))
        return value  # type: ignore[return-value]
    return _one_by_one(value, step)


def _one_by_one(value: Iterable[Any], step: int) -> Iterator[Any]:
    for entry in value:
        _budget.get().spend(ENTRY + step)
        yield entry


def _joined(parts: Sequence[Any]) -> str:
    _budget.get().spend_on(parts)
    return "".join(map(str, parts))


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    part = value[start:stop:step]
    if isinstance(part, str):
        _budget.get().spend(len(part))
    else:
        _budget.get().spend_on(part, REFERRED)
    return part


def _made(value: Any) -> Any:
    _budget.get().spend_on(value, REFERRED)
    return value


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what goes in, as far as it is copied, and for what comes out."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget, value = _budget.get(), args[first]
        budget.spend(5 * len(value) if isinstance(value, str) else ENTRY)
        if name in TEXTUAL and not isinstance(value, str):
            budget.spend_on(value)
        if name in COLLECTING and isinstance(value, str):
            budget.spend(ENTRY * len(value))
        result = function(*args, **kwargs)
        if name in COLLECTING:
            result = result if isinstance(result, str | list | dict | tuple) else list(_one_by_one(result, 0))
            budget.spend_on(result, REFERRED)
        elif isinstance(result, str):
            budget.spend(len(result))
        return result

    return paid


def _string(value: Any) -> Any:
    if isinstance(value, str):
        return value
    _budget.get().spend_on(value)
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
    parts = list(_counted(value, 0))
    for part in parts:
        _budget.get().spend_on(part)
    _budget.get().spend(len(parts) * len(str(_string(d))))
    return str(d).join(map(str, parts))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(_string(part)) for part in (value, old, new))
    args = (old, new) if count is None else (old, new, count)
    return text.replace(*_pay_for_method(_budget.get(), text, "replace", args))


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = " " * _within(width) if isinstance(width, int) else str(width)
    text = str(_string(value)) + "\n"  # this quirk of jinja2 is necessary for splitlines
    _budget.get().spend(len(margin) * (text.count("\n") + 1) + ENTRY * text.count("\n"))
    lines = text.splitlines()
    head, rest = lines[0], lines[1:]
    if blank:
        body = ("\n" + margin).join(lines)
    else:
        body = "\n".join([head, *(margin + line if line else line for line in rest)])
    return margin + body if first else body


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    precision = _within(int(precision))
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
    return sum(_counted(value, 0), start)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TemplateError("format takes positional or named arguments, not both")
    text = str(value)
    _pay_for_printf(_budget.get(), text, kwargs or args)
    return text % (kwargs or args)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    deep = DEEPEST * _within(indent) if indent is not None and indent > 0 else 0
    budget = _budget.get()
    before = budget.left
    budget.spend_on(value)
    budget.spend(
        (before - budget.left) * (6 if ensure_ascii else 2) + (before - budget.left) // ENTRY * deep // 8
    )
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _within(width: int) -> int:
    if not -WIDEST <= width <= WIDEST:
        raise TooMuch(f"a width is beyond {WIDEST}")
    return width


def _pay_for_product(budget: Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int) and times > 0:
            before = budget.left
            budget.spend_on(value, 1 if isinstance(value, str) else REFERRED)
            budget.spend((before - budget.left) * (times - 1))
            return
        if isinstance(value, int) and value.bit_length() > LONGEST_POWER:
            raise TooMuch("a number is too large")
    budget.spend(1)


def _pay_for_printf(budget: Budget, form: str, values: Any) -> None:
    pieces = PRINTF.findall(form)
    for size in chain.from_iterable(pieces):
        if size == "*" or len(size) > 4:
            raise TooMuch(f"a width is beyond {WIDEST}")
        budget.spend(int(size or 0))
    _pay_each_time(budget, values if isinstance(values, tuple | dict) else (values,), len(pieces), len(form))


def _pay_for_format(budget: Budget, form: str, values: Any) -> None:
    count = 0
    for _, name, spec, _ in string.Formatter().parse(form):
        if name is None:
            continue
        count += 1
        if spec and ("{" in spec or any(len(size) > 4 for size in re.findall(r"\d+", spec))):
            raise TooMuch(f"a width is not plain, or beyond {WIDEST}")
        budget.spend(sum(int(size) for size in re.findall(r"\d+", spec or "")))
    _pay_each_time(budget, values, count, len(form))


def _pay_each_time(budget: Budget, values: Any, times: int, length: int) -> None:
    """As if every value came up every time: more than that it cannot be."""
    before = budget.left
    budget.spend_on(values)
    budget.spend((before - budget.left) * max(0, times - 1) + length)


def _pay_for_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pay before a method of a plain value is called; returns its arguments."""
    if not isinstance(owner, str):
        budget.spend(ENTRY * len(owner) if isinstance(owner, Sized) else 1)
        if args and name in ("count", "index"):
            budget.spend_on(owner, REFERRED)
    elif name in ("split", "rsplit", "splitlines"):
        plain = name == "splitlines" or not args or not isinstance(args[0], str) or not args[0]
        budget.spend(len(owner) + ENTRY * (len(owner) if plain else owner.count(args[0]) + 1))
    elif name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        budget.spend(len(owner) + len(new) * (owner.count(old) if old else len(owner) + 1))
    elif name == "join" and args:
        parts = list(_counted(args[0], 0))
        for part in parts:
            budget.spend_on(part)
        budget.spend(len(parts) * len(owner))
        return (parts,)
    elif name in ("center", "ljust", "rjust", "zfill") and args:
        budget.spend(len(owner) + abs(_within(int(args[0]))))
    else:
        budget.spend(len(owner))
    return args


def _raise(message: Any) -> None:
    raise TemplateError(str(_string(message))[:LONGEST_MESSAGE])


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"%[-_0^#+]*\d", form):
        raise TooMuch("a date takes a plain format")
    return datetime.now().strftime(form)


OURS: dict[str, Callable[..., Any]] = {
    "e": _escape, "escape": _escape, "format": _format, "indent": _indent, "join": _join, "replace": _replace,
    "round": _round, "safe": _string, "string": _string, "sum": _sum, "tojson": _tojson,
}  # fmt: skip
HELPERS = {"counted:": _counted, "joined:": _joined, "sliced:": _sliced, "made:": _made}
_ENVIRONMENT = _Environment()
