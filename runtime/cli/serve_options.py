"""The options of `serve`, and their defaults from a TOML file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..serve.options import LogFormat, LogLevel


class ServeCommand(TyperCommand):
    """Each option has a variable, MARS_PORT for --port, which the help does not repeat for every one. An
    empty value is an error: MARS_API_KEY from a variable that is not set would open the server.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            parameter.show_envvar = False  # type: ignore[attr-defined]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            variable, value = f"MARS_{str(parameter.name).upper()}", ctx.params.get(str(parameter.name))
            if os.environ.get(variable, "-").strip() == "":
                raise typer.BadParameter(f"the variable {variable} is empty; unset it, or give it a value")
            if "" in (value if isinstance(value, list | tuple) else (value,)):
                raise typer.BadParameter("the value is empty", ctx, parameter)  # type: ignore[arg-type]
        return rest


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
    if empty := [key for key, value in values.items() if value in ("", [])]:
        raise typer.BadParameter(f"{path}: {', '.join(empty)}: the value is empty; leave the key out")
    context.default_map = {known[key].name: _texts(known[key], value) for key, value in values.items()}
    return path


def _texts(parameter: Any, value: Any) -> str | list[str]:
    """A value as the command line would have it, so that it is checked in the same way."""
    values = [str(item) for item in (value if isinstance(value, list) else [value])]
    return values if parameter.nargs == -1 or getattr(parameter, "multiple", False) else ",".join(values)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """API keys, and the pages and host names that may send requests.

    Access:
    api_key: API key to accept. Repeatable; in the variable MARS_API_KEY, separate keys with spaces. Without
        keys, every request is accepted.
    api_key_file: File of API keys, one per line. SIGHUP reads it again.
    cors_origin: Allowed CORS origin, or * for any. Repeatable.
    allowed_host: Host name of this server, such as its name at a proxy. Repeatable.
    """

    api_key: Annotated[tuple[str, ...], typer.Option(metavar="KEY")] = ()
    api_key_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE")] = None
    cors_origin: Annotated[tuple[str, ...], typer.Option(metavar="URL")] = ()
    allowed_host: Annotated[tuple[str, ...], typer.Option(metavar="NAME")] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        from ..serve.keys import parse_keys, read_keys

        keys = parse_keys(self.api_key, "--api-key") if self.api_key else ()
        return keys + (read_keys(self.api_key_file) if self.api_key_file is not None else ())

    def hosts(self, host: str) -> frozenset[str] | None:
        """The allowed Host headers, or None for any. On a loopback address, another name means that a web
        page rebinds its own name to this machine.
        """
        if not (is_loopback(host) or self.allowed_host):
            return None
        names = ("localhost", "127.0.0.1", "[::1]", in_url(host), *self.allowed_host)
        return frozenset(name.lower() for name in names)


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Replicas of the bundles as processes, with Ray Serve.

    Replicas (Ray Serve):
    ray: Run replicas as separate processes with one address.
    replicas: Number of replicas; MIN:MAX grows with the load. 1 by default.
    address: Deploy to this running Ray cluster and return. By default, Ray runs here until Ctrl-C.
    """

    ray: bool = False
    replicas: Annotated[str | None, typer.Option(metavar="N|MIN:MAX")] = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, its log, and what its models are called.

    host: Address to listen on; 0.0.0.0 is all network interfaces.
    port: Port; 0 is any free one.
    log_level: Least severe entries of the log.
    log_format: json: one object per line.
    traces: Send OpenTelemetry traces by OTLP, as the variables OTEL_* say.
    served_model_name: Model name in the API instead of the directory's name; once for each bundle, in order.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 8000
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    traces: bool = False
    served_model_name: Annotated[tuple[str, ...], typer.Option(metavar="NAME")] = ()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
