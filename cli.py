"""The mars-export command line: the commands of its parts under one name, what each needs installed, and what
becomes of errors.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .calibration import commands as calibration
from .exporter import commands as exporter
from .exporter import demo_command as showing
from .runtime.cli import bundles as bundles
from .runtime.cli import chat_command as talking
from .runtime.cli import generate as runtime
from .runtime.cli import grammars as grammars
from .runtime.cli import hub as hub
from .runtime.cli import serve as serving
from .runtime.cli.console import out, print_error, print_warning
from .runtime.errors import MarsError, MarsWarning


@dataclass(frozen=True, slots=True)
class Need:
    """Modules that an extra installs; `enough` says whether all of them are needed or any one will do."""

    extra: str
    modules: tuple[str, ...]
    enough: Callable[[Iterable[object]], bool] = all


RUN = Need("cpu", ("onnxruntime", "tensorrt", "tensorrt_rtx"), any)
EXPORT = Need("export", ("torch", "onnx", "ml_dtypes", "safetensors", "huggingface_hub"))
SERVE = Need("serve", ("starlette", "uvicorn", "prometheus_client"))
HUB = Need("hub", ("huggingface_hub",))
REPORT = Need("calibrate", ("matplotlib",))
# What must be there before a command begins; a command that is not named needs nothing beyond the base.
# `store` is what `prefix` does with a bundle (StoreUnlessNamed).
NEEDS: dict[str, tuple[Need, ...]] = {
    "onnx": (EXPORT, RUN),
    "trt": (EXPORT,),
    "demo": (EXPORT, RUN),
    "generate": (RUN,),
    "chat": (RUN,),
    "serve": (RUN, SERVE),
    "push": (HUB,),
    "pull": (HUB,),
    "calibrate": (RUN, REPORT),
    "bench": (RUN, REPORT),
}


def check_installed(command: str) -> None:
    """Raise MarsError that names all extras which `command` needs and lacks."""
    lacking = {
        need.extra: [name for name in need.modules if not _is_installed(name)]
        for need in NEEDS.get(command, ())
        if not need.enough(_is_installed(name) for name in need.modules)
    }
    if not lacking:
        return
    extras = ",".join(lacking)
    absent = "; ".join(
        f"none of {', '.join(names)}" if extra == RUN.extra else ", ".join(names)
        for extra, names in lacking.items()
    )
    instead = " (or gpu, rtx, trt instead of cpu)" if RUN.extra in lacking else ""
    raise MarsError(
        f"`mars-export {command}` needs more than is installed ({absent}):\n"
        f"  pip install 'mars-export[{extras}]'{instead}\n"
        f"  from a clone: pip install '.[{extras}]'"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


class Commands(TyperGroup):
    """A command says what it lacks before it reads its arguments; `--help` always answers."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and not ctx.resilient_parsing and "--help" not in rest:
            check_installed(name)
        return name, command, rest


# Other names of options, known from elsewhere. As second names in their declarations they would take the room
# of what `--help` says, and be cut off on a terminal of 80 columns.
ALSO = {"max-tokens": "max-new-tokens", "temp": "temperature"}
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": lambda name: ALSO.get(name, name)},
)
for part in (
    exporter,
    showing,
    runtime,
    talking,
    serving,
    calibration,
    bundles,
    grammars,
    hub,
):
    app.add_typer(part.app)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"mars-export {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


@app.callback(
    epilog="Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 130 interrupted. With"
    ' --json an error is {"error": {"kind", "message"}} on standard output, too.'
)
def describe(version: Version = False) -> None:
    """Export MARS multi-token language models and run them with a speed/quality knob per request."""


def main() -> None:
    """Console entry point: errors of ours in one block and exit code 1, Ctrl-C with 130, no tracebacks. With
    --json they are a line of JSON on standard output, too.
    """
    if sys.stdin is None:  # closed where it was started
        sys.stdin = io.StringIO()
    with warnings.catch_warnings():
        warnings.showwarning = _shown_by(warnings.showwarning)
        try:
            app()
        except MarsError as error:
            print_error(error, as_json="--json" in sys.argv)
            sys.exit(1)
        except BrokenPipeError:
            sys.stderr.close()  # the reader went away, as in `| head`
            sys.exit(0)
        except OSError as error:  # a full disk, a name that is too long
            where = f"{error.filename}: " if error.filename else ""
            problem = MarsError(f"{where}{error.strerror or error}")
            try:
                print_error(problem, as_json="--json" in sys.argv)
            except OSError:  # what is full is standard output
                print_error(problem)
            with suppress(OSError):
                sys.stdout.close()
            sys.exit(1)


def _shown_by(others: Callable[..., None]) -> Callable[..., None]:
    """Warnings of ours in one block, `others` as ever."""

    def show(message: Any, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, MarsWarning):
            print_warning(message)
        else:
            others(message, category, *rest)

    return show


if __name__ == "__main__":
    main()
