"""Options that commands share, with panels in --help, and the decorator that reads dataclasses of options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from ..rules import Rule
from .console import err, text_of

MODEL = "Model and device"  # a panel of --help


def option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """An option that --help shows in a panel with others of its kind."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="Bundle directory, as `mars-export onnx` writes it.")
]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the profile or grammar.")]

Device = Annotated[str, option(MODEL, "cpu, cuda, or cuda:1 for another GPU. A missing device is an error.")]

VariantName = Annotated[
    str | None, option(MODEL, "Variant of the bundle. By default the best one for the device.", "--variant")
]


def at_most_cores(threads: int | None) -> int | None:
    """Clamp --threads to the number of cores, with a warning: more threads are much slower."""
    from ..machine import cores

    if threads is None or threads <= cores():
        return threads
    err.print(
        f"--threads {threads}: this machine has {cores()} cores; {cores()} threads are used", style="yellow"
    )
    return cores()


Threads = Annotated[
    int | None,
    option(
        MODEL,
        "Compute threads. By default the backend decides.",
        "--threads",
        "-t",
        metavar="N",
        min=1,
        callback=at_most_cores,
    ),
]

Level = Annotated[
    int | None,
    option(
        MODEL,
        "For int4 and int8 weights: 0 computes in floating point (slow), 4 in 8 bits (fast). By default the"
        " level that the export measured.",
        "--accuracy-level",
        metavar="N",
    ),
]

Safe = Annotated[
    bool,
    option(
        MODEL,
        "Use --safe for bundles that you do not trust: check every hash, run neither the chat template nor a"
        " TensorRT engine, and limit memory.",
        "--safe/--trust",
    ),
]

Strict = Annotated[bool, option(MODEL, "Fail if a GPU leaves large operators to the CPU.", "--strict")]

ParseSpecial = Annotated[
    bool,
    option(
        MODEL,
        "Parse special tokens, such as <|im_end|>, in messages. By default they are plain text.",
        "--parse-special",
    ),
]


def bytes_of(value: str | int) -> int:
    """The value of a byte option: a number, or one with K, M or G (powers of 1024)."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(?:I?B)?", str(value).upper())
    if match is None:
        raise typer.BadParameter(f"a number of bytes, such as 4194304, 4M or 1G, is expected, not {value!r}")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


Size = {"metavar": "SIZE", "parser": bytes_of}  # settings of a byte option
Count = Annotated[int, typer.Option(metavar="N", min=1)]
Most = Annotated[int | None, typer.Option(metavar="N", min=1)]
File = Annotated[Path | None, typer.Option(exists=True, dir_okay=False)]
MostBytes = Annotated[int | None, typer.Option(**Size)]


def comma_separated(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def masks_of(masks: str) -> str | int:
    if masks in ("auto", "full"):
        return masks
    if not (masks.isascii() and masks.isdecimal() and len(masks) < 10):
        raise typer.BadParameter(f"auto, full or a number of 0 or more, not {masks!r}")
    return int(masks)


def file_text(name: str) -> str | None:
    try:
        return text_of(Path(name))
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}") from error


PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "SIZE": bytes_of, "auto|full|N": masks_of, "FILE": file_text,
}  # fmt: skip
"""Parsers of option values, by the metavar of their rule."""
PYTHON_ONLY = "Python only"  # a panel whose fields are no options


def with_default(name: str) -> type[TyperGroup]:
    """A group with a default subcommand: with store, `grammar BUNDLE` means `grammar store BUNDLE`."""

    class WithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] not in ("--help", *ctx.help_option_names):
                args = [name, *args]
            return super().parse_args(ctx, args)

    return WithDefault


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make each parameter whose type is a dataclass stand for one option per field, except for fields that
    are parameters of the command themselves. A parameter of type `Annotated[dict[str, Any], DATACLASS]` gets
    a dictionary of the options that are given.

    An option's help is the field's description in the docstring of its dataclass, `name: text`; a line such
    as `Limits:` begins a panel, and the fields after `Python only:` are no options. An Annotated field adds
    other settings, or has a Rule, which the dataclass checks. An option that is not given leaves the field's
    default.

    Typer reads signatures, so the command gets a flat one; its values are put back into the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    types = {
        name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()
    }
    plain = {
        name
        for name, hint in hints.items()
        if not (
            is_dataclass(types[name]) or any(isinstance(a, type) and is_dataclass(a) for a in get_args(hint))
        )
    }
    groups = {name: _options(hints[name], plain) for name in types if name not in plain}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += groups[name].values()
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    def run(**values: Any) -> None:
        for name, options in groups.items():
            given = {option: values.pop(option) for option in options}
            given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
            values[name] = types[name](**given)
        command(**values)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


DESCRIBED = re.compile(r"^(?P<panel>\S.*):$|^(?P<name>\w+): (?P<text>.*(?:\n +.*)*)$", re.MULTILINE)


def _options(hint: Any, taken: Collection[str]) -> dict[str, Parameter]:
    """The options of a dataclass, by field, without fields of the names `taken`."""
    is_dict = get_origin(hint) is Annotated
    group: Any = get_args(hint)[1] if is_dict else hint
    described = dict[str, tuple[str | None, str]]()
    for base in filter(is_dataclass, group.__mro__):
        panel = None
        for match in DESCRIBED.finditer(cleandoc(base.__doc__ or "")):
            panel = match["panel"] or panel
            if match["name"]:
                described[match["name"]] = panel, " ".join(match["text"].split())
    hints, options = get_type_hints(group, include_extras=True), dict[str, Parameter]()
    for field in fields(group):
        panel, text = described.get(field.name, (None, None))
        if field.name in taken or panel == PYTHON_ONLY:
            continue
        default = None if is_dict or isinstance(field.default, tuple) else field.default
        hint, info = _option(field.name, hints[field.name], default)
        info.rich_help_panel, info.help = panel or info.rich_help_panel, text or info.help
        options[field.name] = Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
        )
    return options


def _option(name: str, hint: Any, default: Any) -> tuple[Any, Any]:
    """The type of a field on the command line, and its option."""
    hint, *settings = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    rule = next((each for each in settings if isinstance(each, Rule)), None)
    if settings and rule is None:
        info = copy(settings[0])
        if info.parser is not None:
            hint = str
    else:
        is_flag = hint in (bool, bool | None) and not default  # without a --no- form
        names = [f"--{name.replace('_', '-')}"] if is_flag else []
        info = typer.Option(*names, metavar=rule.metavar if rule is not None else None)
    if rule is not None and (parser := PARSERS.get(rule.metavar or "")) is not None:
        hint, info.parser = str, parser
        info.show_default = default is None  # the help text has it, such as 4M
    if hint in (tuple[str, ...], Sequence[str], Sequence[str] | None):
        hint = list[str]
    return hint if default is not None else hint | None, info
