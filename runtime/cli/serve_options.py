"""The options of `serve`, and their defaults from a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal.options import Size, option

if TYPE_CHECKING:
    from ..decode.schedule import Limits


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


# Panels of --help
ACCESS = "Access"
LIMITS = "Limits"
REPLICAS = "Replicas (Ray Serve)"


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """API keys, and the pages and host names that may send requests."""

    api_key: Annotated[
        list[str] | None,
        option(
            ACCESS,
            "API key to accept. Repeatable; in the variable MARS_API_KEY, separate keys with spaces. Without"
            " keys, every request is accepted.",
            "--api-key",
            metavar="KEY",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            ACCESS,
            "File of API keys, one per line. SIGHUP reads it again.",
            exists=True,
            dir_okay=False,
            metavar="FILE",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        option(ACCESS, "Allowed CORS origin, or * for any. Repeatable.", metavar="URL"),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        option(ACCESS, "Host name of this server, for example behind a proxy. Repeatable.", metavar="NAME"),
    ] = None

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
        names = ("localhost", "127.0.0.1", "[::1]", in_url(host), *(self.allowed_host or []))
        return frozenset(name.lower() for name in names)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How much may be asked of the server at once."""

    max_rows: Annotated[
        int | None,
        option(
            LIMITS,
            "Requests of each bundle that run at once: 8, or fewer if its engine has fewer rows.",
            metavar="N",
            min=1,
        ),
    ] = None
    max_rows_per_client: Annotated[
        int | None,
        option(
            LIMITS,
            "Requests that run at once for one API key, or for one address if there are no keys; --max-rows"
            " by default.",
            metavar="N",
            min=1,
        ),
    ] = None
    max_waiting: Annotated[
        int,
        option(
            LIMITS, "Requests of each bundle that may wait; further ones get status 429.", metavar="N", min=1
        ),
    ] = 64
    max_prompt_tokens: Annotated[
        int | None, option(LIMITS, "Maximum tokens of a prompt; the context by default.", metavar="N", min=1)
    ] = None
    max_new_tokens: Annotated[
        int | None, option(LIMITS, "Maximum tokens of an answer; the context by default.", metavar="N", min=1)
    ] = None
    kv_bytes: Annotated[
        int | None, option(LIMITS, "KV memory of each bundle's batch, such as 2G.", **Size)
    ] = None
    max_models: Annotated[
        int | None,
        option(LIMITS, "Bundles that are open at once; all by default.", metavar="N", min=1),
    ] = None
    max_model_bytes: Annotated[
        int | None,
        option(LIMITS, "Graphs and weights of the bundles that are open at once, such as 8G.", **Size),
    ] = None
    max_body: Annotated[
        int, option(LIMITS, "Largest request body; 4M by default.", show_default=False, **Size)
    ] = 4 << 20
    request_timeout: Annotated[
        float,
        option(LIMITS, "Maximum seconds per request, including the time in the queue.", metavar="SECONDS"),
    ] = 600
    queue_timeout: Annotated[float, option(LIMITS, "Seconds that a request may wait.", metavar="SECONDS")] = (
        60
    )
    drain_timeout: Annotated[
        float,
        option(
            LIMITS,
            "Seconds that running requests have to finish after SIGTERM. A second signal exits at once.",
            metavar="SECONDS",
            min=0.0,
        ),
    ] = 30

    @property
    def limits(self) -> Limits:
        from ..decode.schedule import Limits

        return Limits(
            max_rows=self.max_rows or Limits().max_rows, max_waiting=self.max_waiting,
            max_prompt_tokens=self.max_prompt_tokens, max_new_tokens=self.max_new_tokens,
            kv_bytes=self.kv_bytes, max_rows_per_client=self.max_rows_per_client,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Replicas of the bundles as processes, with Ray Serve."""

    ray: Annotated[
        bool, option(REPLICAS, "Run replicas as separate processes behind one address.", "--ray")
    ] = False
    replicas: Annotated[
        str | None,
        option(
            REPLICAS,
            "Replicas of each bundle; MIN:MAX grows with the load. 1 by default.",
            metavar="N|MIN:MAX",
        ),
    ] = None
    address: Annotated[
        str | None,
        option(
            REPLICAS,
            "Deploy to this running Ray cluster and return. By default, Ray runs here until Ctrl-C.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, and its log."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all network interfaces.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free one.")] = 8000
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error or critical.")] = "info"
    log_format: Annotated[str, typer.Option(help="text, or json: one object per line.")] = "text"
    traces: Annotated[
        bool,
        typer.Option("--traces", help="Send OpenTelemetry traces by OTLP, as the variables OTEL_* say."),
    ] = False


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
