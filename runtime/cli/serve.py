"""The command `serve`: its options, and one call."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MarsError, MarsWarning
from .console import Device, Level, ParseSpecial, Safe, Strict, VariantName, at_most_cores, err, listed

if TYPE_CHECKING:
    from ..serve.ray.fleet import Fleet, Routing, Share

app = typer.Typer()


@app.command()
def serve(
    bundles: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE...", help="Bundles; each is a model of its folder's name.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File of API keys, one a line, of which each request needs one."
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Requests that run at once, of each bundle: 8, or an engine's rows if it has fewer.",
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests that may wait; more get 429 and Retry-After.")
    ] = 64,
    max_rows_per_client: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Of --max-rows, what one API key, or without keys one address, may have; all by default.",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The longest prompt; the context by default.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The longest answer; the context by default.")
    ] = None,
    kv_bytes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="KV memory of each bundle's batch.")
    ] = None,
    max_body: Annotated[
        int, typer.Option(metavar="N", min=1, help="The largest request, in bytes.")
    ] = 4_194_304,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds for a whole answer, its waiting included.")
    ] = 600,
    queue_timeout: Annotated[float, typer.Option(help="Seconds that a request waits for its turn.")] = 60,
    drain_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Seconds for running answers after SIGTERM; a second one ends at once.",
        ),
    ] = 30,
    cache_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Memory of each bundle for texts that were read before; a small share by default, 0: none.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A page that may call from a browser; several times, or *.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that requests may call it by, as behind a proxy; several times."),
    ] = None,
    adaptive: Annotated[
        str | None,
        typer.Option(
            metavar="exact,NAME,...",
            help="Settings for requests that name none, the best first: the longer others wait, the later"
            " the one that is taken.",
        ),
    ] = None,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            metavar="N",
            min=1,
            callback=at_most_cores,
            help="Compute threads of each bundle.",
        ),
    ] = None,
    accuracy_level: Level = None,
    safe: Safe = False,
    strict: Strict = False,
    parse_special: ParseSpecial = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Replicas of it, each a process of its own, behind one address.")
    ] = False,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX", help="Of each bundle, with --ray; MIN:MAX grows with the load. 1 by default."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster that runs, with --ray: the bundles are put there, and stay. One on this"
            " machine by default, until Ctrl-C."
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="With --ray: prefix sends a request to the replica that has read its beginning; even, to the"
            " less busy of two random replicas."
        ),
    ] = "prefix",
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error or critical.")] = "info",
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="One JSON object a line, on standard error.")
    ] = False,
) -> None:
    """Answer over HTTP as OpenAI's API does: chat, completions, streams, tools, and a page at /."""
    from ..decode.schedule import Limits
    from ..serve import ServeOptions
    from ..serve import app as new_app
    from ..serve.keys import read_keys
    from ..serve.logs import LEVELS, listen
    from ..serve.ray.fleet import Fleet
    from ..serve.server import bind, new_server, run
    from ..session.session import Session

    if log_level not in LEVELS:
        raise typer.BadParameter(f"one of {', '.join(LEVELS)}, not {log_level!r}", param_hint="--log-level")
    names = _names(bundles)
    limits = Limits(
        max_rows=max_rows or Limits().max_rows, max_waiting=max_waiting, max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens, kv_bytes=kv_bytes, max_rows_per_client=max_rows_per_client,
    )  # fmt: skip
    options = ServeOptions(
        limits=limits, fits_rows=max_rows is None, max_body=max_body,
        request_timeout=request_timeout, queue_timeout=queue_timeout, drain=drain_timeout,
        keys=read_keys(api_key_file) if api_key_file is not None else (),
        cors_origins=tuple(cors_origin or ()), hosts=_hosts(host, allowed_host or []),
        adaptive=listed(adaptive) if adaptive is not None else (),
    )  # fmt: skip
    if not options.keys and not _is_loopback(host):
        warnings.warn(
            f"anyone who can reach {host}:{port} can use this server; give --api-key-file, or"
            " --host 127.0.0.1",
            MarsWarning,
            stacklevel=1,
        )
    if ray:
        if strict:
            raise typer.BadParameter("--strict is not for --ray")
        shares = _shares(
            names, replicas, threads, device, variant, accuracy_level, cache_bytes, safe, parse_special
        )
        fleet = Fleet(
            tuple(shares), options=replace(options, keys=()), routing=_routing(routing), log_level=log_level,
            key_file=None if api_key_file is None else str(api_key_file.expanduser().resolve()),
            json_logs=json_logs,
        )  # fmt: skip
        _run_fleet(fleet, host, port, address)
        return
    if replicas is not None or address is not None:
        raise typer.BadParameter("--replicas and --address are for --ray")
    listening = bind(host, port)
    with listening:
        sessions = {
            name: Session.open(
                path, device, threads=threads, variant=variant, accuracy_level=accuracy_level,
                cache_bytes=cache_bytes, safe=safe, strict=strict, parse_special=parse_special,
            )
            for name, path in names.items()
        }  # fmt: skip
        door = new_app(sessions, options)
        listen(log_level, as_json=json_logs)
        bound, number = listening.getsockname()[:2]
        shown = f"[{bound}]" if ":" in bound else bound
        err.print(
            f"serving {', '.join(names)} at http://{shown}:{number}, its API at /v1, when it is warm"
            " (Ctrl-C ends)",
            markup=False,
        )
        run(new_server(door, options), listening, door.service.models, options.drain)


def _shares(
    names: dict[str, Path],
    replicas: str | None,
    threads: int | None,
    device: str,
    variant: str | None,
    accuracy_level: int | None,
    cache_bytes: int | None,
    safe: bool,
    parse_special: bool,
) -> list[Share]:
    """The bundles with as many replicas each as is asked for, all cores dealt out where no threads are."""
    from ..machine import cores
    from ..serve.ray.fleet import Share, read_replicas

    numbers = read_replicas(replicas or "1")
    if numbers is None:
        raise typer.BadParameter(f"N or MIN:MAX, 1 or more, not {replicas!r}", param_hint="--replicas")
    least, most = numbers
    own = threads or max(1, cores() // (most * len(names)))
    return [
        Share(
            name, str(path.expanduser().resolve()), least, most, own, float(device != "cpu"), device, variant,
            accuracy_level, cache_bytes, safe, parse_special,
        )
        for name, path in names.items()
    ]  # fmt: skip


def _routing(name: str) -> Routing:
    from ..serve.ray.fleet import ROUTINGS

    for known in ROUTINGS:
        if name == known:
            return known
    raise typer.BadParameter(f"one of {', '.join(ROUTINGS)}, not {name!r}", param_hint="--routing")


def _run_fleet(fleet: Fleet, host: str, port: int, address: str | None) -> None:
    from ..serve.ray.launch import run
    from ..serve.server import bind

    number = port
    if address is None:
        with bind(host, port) as free:  # nobody listens there; Ray's own message would be a traceback
            number = free.getsockname()[1]

    def ready() -> None:
        shown = f"[{host}]" if ":" in host else host
        names = ", ".join(share.name for share in fleet.shares)
        where = f"at http://{shown}:{number} (Ctrl-C ends)" if address is None else f"on {address}"
        err.print(f"serving {names} {where}", markup=False)

    run(fleet, host, number, address, ready)


def _names(bundles: list[Path]) -> dict[str, Path]:
    """The names of the models: those of the folders, without .bundle."""
    names: dict[str, Path] = {}
    for path in bundles:
        name = path.expanduser().resolve().name.removesuffix(".bundle")
        if name in names:
            raise MarsError(f"{path} and {names[name]} have one name, {name}; rename a folder")
        names[name] = path
    return names


def _is_loopback(host: str) -> bool:
    from ipaddress import ip_address

    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _hosts(host: str, others: list[str]) -> frozenset[str] | None:
    """What a Host header may say: behind a loopback address nobody calls by another name, but a page of
    somebody's whose name was made to point here.
    """
    if not (_is_loopback(host) or others):
        return None
    own = f"[{host}]" if ":" in host else host
    return frozenset(name.lower() for name in ("localhost", "127.0.0.1", "[::1]", own, *others))
