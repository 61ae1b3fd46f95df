"""Options of a command from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults of the command's options: the callback of an eager option.

    The keys are the options' names without dashes in front, such as `max-rows`, or the metavar of an argument
    in the plural, `bundles`.
    """
    if path is None:
        return None
    try:
        import tomllib  # novm
    except ModuleNotFoundError as error:
        raise typer.BadParameter("a configuration file needs Python 3.11 or newer") from error
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # also of the decoder, and TOML's
        raise typer.BadParameter(f"{path}: not a TOML file ({error})") from error
    parameters: list[Any] = context.command.params
    known = {p.opts[0].lstrip("-"): p for p in parameters if not (p.is_eager or p.name == "help")}
    if unknown := [key for key in values if key not in known]:
        raise typer.BadParameter(
            f"{path}: unknown {', '.join(unknown)}; keys are names of options, such as max-rows, outside of"
            " tables"
        )
    context.default_map = {known[key].name: _texts(known[key], value) for key, value in values.items()}
    return path


def _texts(parameter: Any, value: Any) -> str | list[str]:
    """A value as the command line would have it, so that it is checked in the same way."""
    if parameter.nargs == -1 or getattr(parameter, "multiple", False):
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return str(value)
