"""The command `serve`."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..decode.limits import Limits
from ..errors import MarsError, MarsWarning
from ..serve.options import ServeOptions
from ..terminal.console import err
from ..terminal.options import takes_options
from .options import SessionOptions
from .serve_options import (
    AccessOptions,
    ReplicaOptions,
    ServeCommand,
    ServerOptions,
    in_url,
    is_loopback,
    read_config,
)

app = typer.Typer()
MANIFEST = "manifest.json"
HUB = "hub:"  # before a repository in place of a bundle's directory


@app.command(cls=ServeCommand, context_settings={"auto_envvar_prefix": "MARS"})
@takes_options
def serve(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            metavar="BUNDLE",
            help="Bundle directories, or directories of bundles. Each bundle is a model with the name of its"
            " directory; several are opened when they are first used. hub:OWNER/NAME pulls a bundle from the"
            " Hugging Face hub, once.",
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
            help="TOML file of these options: port = 80, bundles = [...]. The command line overrides"
            " environment variables, which override the file.",
        ),
    ] = None,
    context: typer.Context,
    server: ServerOptions,
    access: AccessOptions,
    limits: Limits,
    options: ServeOptions,
    model: SessionOptions,
    replicas: ReplicaOptions,
) -> None:
    """Serve bundles with an OpenAI-compatible API.

    The API is at /v1, a chat page at /, metrics at /metrics.

    Each option can also be set by a variable, such as MARS_PORT for --port, or in the file of --config.
    """
    found = [bundle for path in bundles for bundle in _bundles_in(_pulled(path))]
    names = _names(found, server.served_model_name)
    source = context.get_parameter_source("max_rows")
    fits_rows = source is not None and source.name == "DEFAULT"
    origins, hosts = access.cors_origin, access.hosts(server.host)
    options = replace(
        options, limits=limits, fits_rows=fits_rows, keys=access.keys, cors_origins=origins, hosts=hosts
    )
    if not options.keys and not is_loopback(server.host):
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
    from .pull import pull_once

    return pull_once(str(bundle).removeprefix(HUB))


def _bundles_in(path: Path) -> list[Path]:
    """The bundle at `path`, or the bundles in that directory."""
    if (path / MANIFEST).exists():
        return [path]
    return sorted(file.parent for file in path.expanduser().glob(f"*/{MANIFEST}")) or [path]


def _serve_here(
    names: dict[str, Path],
    options: ServeOptions,
    access: AccessOptions,
    model: SessionOptions,
    server: ServerOptions,
) -> None:
    from ..serve import app as new_app
    from ..serve.models import read_bundles
    from ..serve.server import bind, new_server, run, start_log, traced

    listening = bind(server.host, server.port)
    with listening:
        server_app = new_app(read_bundles(names, **asdict(model)), options)
        running = traced(server_app) if server.traces else server_app
        start_log(server.log_level, server.log_format)
        address, number = listening.getsockname()[:2]
        url = f"http://{in_url(address)}:{number}"
        when = "once warm" if len(names) == 1 else "each opened at its first request"
        err.print(f"serving {', '.join(names)} at {url} (API at {url}/v1), {when}; Ctrl-C ends", markup=False)
        service = server_app.service

        def reload() -> int:
            return service.keys.replace(access.keys)

        run(
            *(new_server(running, options), listening, service.models, options.drain_timeout),
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
    """Without --threads, all replicas share the cores."""
    from ..machine import cores
    from ..serve.ray.fleet import Fleet, read_replicas
    from ..serve.ray.launch import run
    from ..serve.server import bind

    if server.traces:
        raise typer.BadParameter("--traces does not work with --ray")
    largest = read_replicas(replicas.replicas or 1)[1]
    if largest == 0:
        raise typer.BadParameter(
            f"N or MIN:MAX, 1 or more, not {replicas.replicas!r}", param_hint="--replicas"
        )
    settings = asdict(model)
    threads = settings.pop("threads") or max(1, cores() // largest)
    if model.prefix_dir is not None:
        settings["prefix_dir"] = str(model.prefix_dir.expanduser().resolve())
    fleet = Fleet(
        {name: str(path.expanduser().resolve()) for name, path in names.items()},
        replicas.replicas or 1, threads, float(model.device != "cpu"), settings, replace(options, keys=()),
        None if access.api_key_file is None else str(access.api_key_file.expanduser().resolve()),
        server.log_level, server.log_format,
    )  # fmt: skip
    address, host, port = replicas.address, server.host, server.port
    if address is None:
        with bind(host, port) as probe:  # Ray prints a traceback if the port is taken
            port = probe.getsockname()[1]

    def ready() -> None:
        where = f"at http://{in_url(host)}:{port} (Ctrl-C ends)" if address is None else f"on {address}"
        err.print(f"serving {', '.join(names)} {where}", markup=False)

    run(fleet, host, port, address, ready)


def _names(bundles: list[Path], served: tuple[str, ...]) -> dict[str, Path]:
    """The bundles by model name: --served-model-name, or the directory's name without .bundle."""
    if served and len(served) != len(bundles):
        raise typer.BadParameter(
            f"one name per bundle is expected: {len(bundles)}, not {len(served)}",
            param_hint="--served-model-name",
        )
    names: dict[str, Path] = {}
    folders = [path.expanduser().resolve().name.removesuffix(".bundle") for path in bundles]
    for path, name in zip(bundles, served or folders, strict=True):
        if name in names:
            raise MarsError(
                f"{path} and {names[name]} have the same name, {name}; use --served-model-name for each",
                field="served_model_name",
            )
        names[name] = path
    return names
