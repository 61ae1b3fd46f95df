"""The mars-export command line: the commands of its parts under one name, and what becomes of errors."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import __version__
from .calibration import commands as calibration
from .exporter import commands as exporter
from .runtime import bundle_commands as bundles
from .runtime import commands as runtime
from .runtime.console import out, print_error
from .runtime.errors import MarsError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
for part in (exporter, runtime, calibration, bundles):
    app.add_typer(part.app)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"mars-export {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


@app.callback()
def describe(version: Version = False) -> None:
    """Export MARS multi-token language models and run them with a speed/quality knob per request."""


def main() -> None:
    """Console entry point: errors of ours in one block and exit code 1, Ctrl-C with 130, no tracebacks."""
    try:
        app()
    except MarsError as error:
        print_error(error)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away, as in `| head`
        sys.exit(0)


if __name__ == "__main__":
    main()
