"""The command `mars-export`: its subcommands, the packages that each one needs, and error handling."""

from __future__ import annotations

import inspect
import io
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .runtime.errors import MarsError, MarsWarning
from .runtime.terminal.console import out, print_error, print_warning


@dataclass(frozen=True, slots=True)
class Need:
    """Modules that an extra installs. `enough` is `all` if a command needs all of them, or `any`."""

    extra: str
    modules: tuple[str, ...]
    enough: Callable[[Iterable[object]], bool] = all


RUN = Need("cpu", ("onnxruntime", "tensorrt", "tensorrt_rtx"), any)
EXPORT = Need("export", ("torch", "transformers", "onnx", "ml_dtypes", "safetensors", "huggingface_hub"))
ONNX = Need("export", ("onnx", "ml_dtypes"))  # enough for `trt` on a bundle; open_checkpoint needs the others
SERVE = Need("serve", ("starlette", "uvicorn", "prometheus_client"))
# What a command needs beyond the base installation.
NEEDS: dict[str, tuple[Need, ...]] = {
    "onnx": (EXPORT, RUN),
    "trt": (ONNX,),
    "generate": (RUN,),
    "chat": (RUN,),
    "serve": (RUN, SERVE),
    "calibrate": (RUN,),
    "bench": (RUN,),
}


def check_installed(command: str) -> None:
    """Raise a MarsError that names all extras which `command` needs and which are not installed."""
    missing = {
        need.extra: [name for name in need.modules if not _is_installed(name)]
        for need in NEEDS.get(command, ())
        if not need.enough(_is_installed(name) for name in need.modules)
    }
    if not missing:
        return
    extras = ",".join(missing)
    modules = "; ".join(
        f"none of {', '.join(names)}" if extra == RUN.extra else ", ".join(names)
        for extra, names in missing.items()
    )
    instead = " (or gpu, rtx, trt instead of cpu)" if RUN.extra in missing else ""
    raise MarsError(
        f"`mars-export {command}` needs more than is installed ({modules}):\n"
        f"  pip install 'mars-export[{extras}]'{instead}\n"
        f"  from a clone: pip install '.[{extras}]'"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# The commands, by panel of `--help`, and the module of each.
PANELS = {
    "Run": {
        "generate": "runtime.cli.generate",
        "chat": "runtime.cli.chat",
        "serve": "runtime.cli.serve",
    },
    "Export": dict.fromkeys(("onnx", "trt"), "exporter.commands"),
    "Measure": dict.fromkeys(("calibrate", "bench"), "calibration.commands"),
    "Bundles": dict.fromkeys(("inspect", "doctor", "verify", "pull", "profiles"), "runtime.cli.bundles")
    | {"grammar": "runtime.cli.grammars"},
}


class CommandsOnUse(Mapping[str, Any]):
    """All commands by name. The module of a command is imported when the command is looked up."""

    def __iter__(self) -> Iterator[str]:
        return (name for names in PANELS.values() for name in names)

    def __len__(self) -> int:
        return sum(map(len, PANELS.values()))

    def __getitem__(self, name: str) -> Any:
        for panel, modules in PANELS.items():
            if name in modules:
                return _commands_of(modules[name], panel)[name]
        raise KeyError(name)


class Commands(TyperGroup):
    """Checks the packages of a command before it parses its arguments, unless they have `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = CommandsOnUse()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and not ctx.resilient_parsing and "--help" not in rest:
            check_installed(name)
        return name, command, rest


# Option names of other tools. In the declarations they would take up room in `--help`.
ALIASES = {"max-tokens": "max-new-tokens", "temp": "temperature"}
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": lambda name: ALIASES.get(name, name)},
)
TERMS = "Terms such as bundle, block, slot, tau and profile are explained in docs/glossary.md."


@cache
def _commands_of(module: str, panel: str) -> dict[str, Any]:
    """The commands of a module, in a panel of `--help`."""
    part = import_module(f".{module}", __package__).app
    _describe(part, panel)
    group = typer.Typer(add_completion=False, rich_markup_mode="rich")
    group.add_typer(part)
    return typer.main.get_command(group).commands  # type: ignore[attr-defined,no-any-return]


def _describe(part: typer.Typer, panel: str | None = None) -> None:
    """Set the panel of a part's commands, join the lines of their texts, and name the glossary."""
    for command in part.registered_commands:
        command.epilog = TERMS
        command.rich_help_panel = panel
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    for group in part.registered_groups:
        group.rich_help_panel = panel
        if group.typer_instance is not None:
            _describe(group.typer_instance)


def _print_version(show: bool) -> None:
    if show:
        out.print(f"mars-export {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


@app.callback(
    epilog="Exit codes: 0 success, 1 error, 2 wrong option, argument or prompt, 130 interrupted, 143 SIGTERM."
    f' With --json, errors are also printed on standard output: {{"error": {{"kind", "message"}}}}. {TERMS}'
)
def describe(version: Version = False) -> None:
    """Export MARS multi-token language models, run and serve them."""


def main() -> None:
    """Entry point. MarsError and OSError end with a message and an exit code, not with a traceback."""
    if sys.stdin is None:  # the caller closed it
        sys.stdin = io.StringIO()
    for number in (signal.SIGTERM, signal.SIGHUP):  # they clean up as Ctrl-C does; `serve` has its own
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with warnings.catch_warnings():
        warnings.showwarning = _print_warnings(warnings.showwarning)
        try:
            app()
        except MarsError as error:
            print_error(error, as_json="--json" in sys.argv)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.stderr.close()  # the reader has ended, as in `| head`
            sys.exit(0)
        except OSError as error:  # a full disk, a name that is too long
            where = f"{error.filename}: " if error.filename else ""
            problem = MarsError(f"{where}{error.strerror or error}")
            try:
                print_error(problem, as_json="--json" in sys.argv)
            except OSError:  # standard output is full
                print_error(problem)
            with suppress(OSError):
                sys.stdout.close()
            sys.exit(1)


def _print_warnings(others: Callable[..., None]) -> Callable[..., None]:
    """A handler that prints each MarsWarning as a message, and passes other warnings to `others`."""

    def show(message: Any, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, MarsWarning):
            print_warning(message)
        else:
            others(message, category, *rest)

    return show


if __name__ == "__main__":
    main()
