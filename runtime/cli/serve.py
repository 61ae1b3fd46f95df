"""The command `serve`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import MarsError, MarsWarning
from .config_file import read_config
from .console import Size, err, listed, option
from .options import SessionOptions, takes_options

if TYPE_CHECKING:
    from ..decode.schedule import Limits
    from ..serve import ServeOptions
    from ..serve.ray.fleet import Share

app = typer.Typer()
# Panels of --help
ACCESS = "Access"
LIMITS = "Limits"
REPLICAS = "Replicas (Ray Serve)"
HUB = "hub:"  # before a repository in place of a bundle's directory


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
        if not (_is_loopback(host) or self.allowed_host):
            return None
        names = ("localhost", "127.0.0.1", "[::1]", _in_url(host), *(self.allowed_host or []))
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
    routing: Annotated[
        str,
        option(
            REPLICAS,
            "prefix: prefer the replica whose prefix cache has the prompt; even: the less busy of two random"
            " replicas.",
            metavar="prefix|even",
        ),
    ] = "prefix"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, and its log."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all network interfaces.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free one.")] = 8000
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error or critical.")] = "info"
    log_format: Annotated[str, typer.Option(help="text, or json: one object per line.")] = "text"


class ServeCommand(TyperCommand):
    """Each option has a variable, MARS_PORT for --port, which the help does not repeat for every one."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            parameter.show_envvar = False  # type: ignore[attr-defined]


@app.command(cls=ServeCommand, context_settings={"auto_envvar_prefix": "MARS"})
@takes_options
def serve(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            metavar="BUNDLE",
            help="Bundle directories. Each is a model with the name of its directory. hub:OWNER/NAME pulls a"
            " bundle from the Hugging Face hub, once.",
        ),
    ],
    *,
    config: Annotated[  # noqa: ARG001  # its callback has read it
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            help="TOML file of these options: port = 80, bundles = [...]. The command line comes first, then"
            " variables, then the file.",
        ),
    ] = None,
    server: ServerOptions,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model name in the API instead of the directory's name; once for each bundle, in order.",
        ),
    ] = None,
    adaptive: Annotated[
        str | None,
        typer.Option(
            metavar="exact,NAME,...",
            help="Profiles for requests that set neither exact nor tau. The server starts with the first and"
            " moves on to the next while requests wait too long.",
        ),
    ] = None,
    access: AccessOptions,
    limits: LimitOptions,
    model: SessionOptions,
    replicas: ReplicaOptions,
) -> None:
    """Serve bundles with an OpenAI-compatible API.

    The API is at /v1, a chat page at /, metrics at /metrics.

    Each option can also be set by a variable, such as MARS_PORT for --port, or in the file of --config.
    """
    from ..serve import ServeOptions
    from ..serve.logs import FORMATS, LEVELS

    for name, value, known in (
        ("--log-level", server.log_level, LEVELS),
        ("--log-format", server.log_format, FORMATS),
    ):
        if value not in known:
            raise typer.BadParameter(f"one of {', '.join(known)}, not {value!r}", param_hint=name)
    names = _names([_pulled(bundle) for bundle in bundles], served_model_name or [])
    options = ServeOptions(
        limits=limits.limits, fits_rows=limits.max_rows is None, max_body=limits.max_body,
        request_timeout=limits.request_timeout, queue_timeout=limits.queue_timeout,
        drain=limits.drain_timeout, keys=access.keys, cors_origins=tuple(access.cors_origin or ()),
        hosts=access.hosts(server.host), adaptive=listed(adaptive) if adaptive is not None else (),
    )  # fmt: skip
    if not options.keys and not _is_loopback(server.host):
        warnings.warn(
            f"anyone who can reach {server.host}:{server.port} can use this server; set --api-key, or"
            " --host 127.0.0.1",
            MarsWarning,
            stacklevel=1,
        )
    if replicas.ray:
        if access.api_key:
            raise typer.BadParameter("--ray reads keys from --api-key-file, not from --api-key")
        _serve_replicas(names, options, access, model, replicas, server)
        return
    if replicas.replicas is not None or replicas.address is not None:
        raise typer.BadParameter("--replicas and --address need --ray")
    _serve_here(names, options, access, model, server)


def _pulled(bundle: Path) -> Path:
    """The directory of a bundle, which is pulled if it is hub:OWNER/NAME."""
    if not str(bundle).startswith(HUB):
        return bundle
    from .hub_repository import pull_once

    return pull_once(str(bundle).removeprefix(HUB))


def _serve_here(
    names: dict[str, Path],
    options: ServeOptions,
    access: AccessOptions,
    model: SessionOptions,
    server: ServerOptions,
) -> None:
    from ..serve import app as new_app
    from ..serve.logs import listen
    from ..serve.server import bind, new_server, run

    listening = bind(server.host, server.port)
    with listening:
        server_app = new_app({name: model.open(path) for name, path in names.items()}, options)
        listen(server.log_level, server.log_format)
        address, number = listening.getsockname()[:2]
        url = f"http://{_in_url(address)}:{number}"
        err.print(
            f"serving {', '.join(names)} at {url} (API at {url}/v1) once warm; Ctrl-C ends", markup=False
        )
        service = server_app.service

        def reload() -> int:
            return service.keys.replace(access.keys)

        run(
            *(new_server(server_app, options), listening, service.models, options.drain),
            reload=reload if access.api_key_file is not None else None,
        )


def _serve_replicas(
    names: dict[str, Path],
    options: ServeOptions,
    access: AccessOptions,
    model: SessionOptions,
    replicas: ReplicaOptions,
    server: ServerOptions,
) -> None:
    from ..serve.ray.fleet import ROUTINGS, Fleet
    from ..serve.ray.launch import run
    from ..serve.server import bind

    if model.strict:
        raise typer.BadParameter("--strict does not work with --ray")
    if replicas.routing not in ROUTINGS:
        known = ", ".join(ROUTINGS)
        raise typer.BadParameter(f"one of {known}, not {replicas.routing!r}", param_hint="--routing")
    key_file = None if access.api_key_file is None else str(access.api_key_file.expanduser().resolve())
    fleet = Fleet(
        tuple(_shares(names, model, replicas.replicas or "1")), options=replace(options, keys=()),
        routing=replicas.routing, log_level=server.log_level, key_file=key_file,
        log_format=server.log_format,
    )  # fmt: skip
    address, host, port = replicas.address, server.host, server.port
    if address is None:
        with bind(host, port) as probe:  # Ray prints a traceback if the port is taken
            port = probe.getsockname()[1]

    def ready() -> None:
        where = f"at http://{_in_url(host)}:{port} (Ctrl-C ends)" if address is None else f"on {address}"
        err.print(f"serving {', '.join(names)} {where}", markup=False)

    run(fleet, host, port, address, ready)


def _shares(names: dict[str, Path], model: SessionOptions, replicas: str) -> list[Share]:
    """The bundles with their replicas. Without --threads, all replicas share the cores."""
    from ..machine import cores
    from ..serve.ray.fleet import Share, read_replicas

    numbers = read_replicas(replicas)
    if numbers is None:
        raise typer.BadParameter(f"N or MIN:MAX, 1 or more, not {replicas!r}", param_hint="--replicas")
    least, most = numbers
    settings: dict[str, Any] = {
        "least": least, "most": most, "threads": model.threads or max(1, cores() // (most * len(names))),
        "gpus": float(model.device != "cpu"), "device": model.device, "variant": model.variant,
        "accuracy_level": model.accuracy_level, "cache_bytes": model.cache_bytes, "safe": model.safe,
        "parse_special": model.parse_special,
    }  # fmt: skip
    return [Share(name, str(path.expanduser().resolve()), **settings) for name, path in names.items()]


def _names(bundles: list[Path], served: list[str]) -> dict[str, Path]:
    """The bundles by model name: --served-model-name, or the directory's name without .bundle."""
    if served and len(served) != len(bundles):
        raise typer.BadParameter(
            f"one name for each bundle is expected: {len(bundles)}, not {len(served)}",
            param_hint="--served-model-name",
        )
    names: dict[str, Path] = {}
    folders = [path.expanduser().resolve().name.removesuffix(".bundle") for path in bundles]
    for path, name in zip(bundles, served or folders, strict=True):
        if name in names:
            raise MarsError(
                f"{path} and {names[name]} have the same name, {name}; use --served-model-name for each"
            )
        names[name] = path
    return names


def _is_loopback(host: str) -> bool:
    from ipaddress import ip_address

    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
