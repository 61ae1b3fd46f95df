"""The options of `serve`, and their defaults from a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal.options import Count, Most, MostBytes, Size

if TYPE_CHECKING:
    from ..decode.limits import Limits


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


Seconds = typer.Option(metavar="SECONDS")


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

    api_key: Annotated[list[str] | None, typer.Option(metavar="KEY")] = None
    api_key_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE")] = None
    cors_origin: Annotated[list[str] | None, typer.Option(metavar="URL")] = None
    allowed_host: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None

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
    """How much may be asked of the server at once.

    Limits:
    max_rows: Requests of each bundle that run at once: 8, or fewer if its engine has fewer rows.
    max_rows_per_client: Requests that run at once for one API key, or for one address if there are no keys;
        --max-rows by default.
    max_waiting: Requests of each bundle that may wait; further ones get status 429.
    max_prompt_tokens: Maximum tokens of a prompt; the context by default.
    max_new_tokens: Maximum tokens of an answer; the context by default.
    kv_bytes: KV memory of each bundle's requests, such as 2G.
    max_models: Bundles that are open at once; all by default.
    max_model_bytes: Graphs and weights of the bundles that are open at once, such as 8G.
    max_body: Largest request body; 4M by default.
    request_timeout: Maximum seconds per request, including the time in the queue.
    queue_timeout: Seconds that a request may wait.
    drain_timeout: Seconds that running requests have to finish after SIGTERM. A second signal exits at once.
    """

    max_rows: Most = None
    max_rows_per_client: Most = None
    max_waiting: Count = 64
    max_prompt_tokens: Most = None
    max_new_tokens: Most = None
    kv_bytes: MostBytes = None
    max_models: Most = None
    max_model_bytes: MostBytes = None
    max_body: Annotated[int, typer.Option(show_default=False, **Size)] = 4 << 20
    request_timeout: Annotated[float, Seconds] = 600
    queue_timeout: Annotated[float, Seconds] = 60
    drain_timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.0)] = 30

    @property
    def limits(self) -> Limits:
        from ..decode.limits import Limits

        return Limits(
            max_rows=self.max_rows or Limits().max_rows, max_waiting=self.max_waiting,
            max_prompt_tokens=self.max_prompt_tokens, max_new_tokens=self.max_new_tokens,
            kv_bytes=self.kv_bytes, max_rows_per_client=self.max_rows_per_client,
        )  # fmt: skip


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
    log_level: debug, info, warning, error or critical.
    log_format: text, or json: one object per line.
    traces: Send OpenTelemetry traces by OTLP, as the variables OTEL_* say.
    served_model_name: Model name in the API instead of the directory's name; once for each bundle, in order.
    adaptive: Profiles for requests that set neither exact nor tau. The server starts with the first and moves
        on to the next while requests wait too long.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 8000
    log_level: str = "info"
    log_format: str = "text"
    traces: bool = False
    served_model_name: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    adaptive: Annotated[str | None, typer.Option(metavar="exact,NAME,...")] = None


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
