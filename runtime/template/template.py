"""Chat templates of other people: jinja2 in a sandbox with a budget.

Knows no tokens.

A template may reach nothing outside, and what it computes is paid from a budget of work before it is
computed: characters and list entries that come into being, and steps of loops. What may be said in a template
follows from that: expressions become calls of ours when it is compiled, nothing is computed then, and of
jinja2's filters those are left that chat templates use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import wraps
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .budget import (
    ENTRY,
    LONGEST_POWER,
    MOST_WORK,
    REFERRED,
    WORK,
    WORK_PER_CHARACTER,
    Budget,
    TooMuch,
    counted,
    current,
    pay_for_format,
    pay_for_method,
    pay_for_printf,
    pay_for_product,
)
from .filters import FILTERS, HELPERS, OURS, names, output, paid_for, refuse, strftime_now

MOST_SOURCE = 500_000  # characters of a template
METHODS: Mapping[type, tuple[str, ...]] = {
    str: names(
        "capitalize casefold center count endswith find format format_map index isalnum isalpha"
        " isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper"
        " join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust"
        " rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
    ),
    dict: names("copy get items keys values"),
    list: names("copy count index"),
    tuple: names("count index"),
    float: names("is_integer"),
}


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
        token = current.set(Budget(min(work, MOST_WORK)))
        try:
            return self._template.render(messages=messages, **values)
        finally:
            current.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            optimized=False,
            finalize=output,
            cache_size=0,
        )
        chosen = {name: self.filters[name] for name in FILTERS} | OURS
        self.filters = {name: paid_for(name, function) for name, function in chosen.items()} | HELPERS
        kept = ("cycler", "dict", "joiner", "namespace", "range")
        self.globals = {name: self.globals[name] for name in kept}
        self.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Paying().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current.get()
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 1) > LONGEST_POWER:
                raise TooMuch("a power is too large")
        elif operator == "*":
            pay_for_product(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            pay_for_printf(budget, left, right)
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
            pay_for_format(current.get(), value.__self__, (args, kwargs))
            return formatted(*args, **kwargs)

        return bounded

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget, owner = current.get(), getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "?")
        kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
        if kind is None and (
            isinstance(owner, int | float | bytes | type) or getattr(obj, "__objclass__", None)
        ):
            raise SecurityError(f"{name} is not offered to chat templates")
        if kind is not None:
            if name not in METHODS[kind]:
                raise SecurityError(f"{kind.__name__}.{name} is not offered to chat templates")
            args = pay_for_method(budget, owner, name, args)
        else:
            budget.spend_on([*args, *(v for k, v in kwargs.items() if not k.startswith("_"))], REFERRED)
            if isinstance(obj, Macro):
                budget.spend(MACRO)
            if isinstance(obj, LoopContext) and args:
                args = (counted(args[0], MACRO), *args[1:])
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


_ENVIRONMENT = _Environment()
