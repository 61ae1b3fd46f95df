"""The server process: its socket, its signals, its shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from ..errors import MarsError
from .connection import connections
from .models.models import Models
from .options import HEADER_BYTES, ServeOptions

LOG = logging.getLogger("mars_export.serve")
LAST_WRITES = 10  # seconds for sending the rest of answers after the drain time


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; `run` has ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def new_server(app: ASGIApp, options: ServeOptions) -> Server:
    """A server for a bound socket."""
    config = uvicorn.Config(
        app,
        http=connections(options.header_timeout, options.write_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=options.keep_alive,  # type: ignore[arg-type]  # it takes any number
        timeout_graceful_shutdown=int(options.drain_timeout) + LAST_WRITES,
    )
    return Server(config)


def traced(app: ASGIApp) -> ASGIApp:
    """`app` with a span for each request but health checks and metrics. Raises MarsError without `traces`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MarsError(f"--traces needs {error.name}: pip install 'mars-export[traces]'") from error
    provider = TracerProvider()  # it sends the rest at the exit of the process
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    wrapped: ASGIApp = OpenTelemetryMiddleware(
        app, excluded_urls="health,metrics", tracer_provider=provider, exclude_spans=["receive", "send"]
    )
    return wrapped


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises MarsError if the address is not available."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python repeats the address there
        raise MarsError(
            f"cannot listen on {host}:{port} ({reason}); choose another --port or --host"
        ) from error
    listening.set_inheritable(False)
    return listening


def run(
    server: Server,
    listening: socket.socket,
    models: Models,
    drain: float,
    reload: Callable[[], int] | None = None,
) -> None:
    """Serve until a signal. The first one drains and closes the server, the second one ends the process.
    `reload` reads the API keys again at SIGHUP, and returns their number; None if they are in no file.

    Raises MarsError if a bundle fails.
    """

    def end(number: int) -> None:
        if server.should_exit:
            # No cleanup: threads may be inside of a library.
            LOG.warning("second signal: ending at once")
            os._exit(128 + number)
        LOG.info("closing: running answers get %g s", drain)
        threading.Thread(target=models.close, args=(drain,), daemon=True).start()
        server.should_exit = True

    async def serve() -> None:
        if hasattr(signal, "SIGHUP"):  # not on Windows
            _on_signal(signal.SIGHUP, _reload, reload)
        for number in (signal.SIGINT, signal.SIGTERM):
            _on_signal(number, end, number)
        watch = asyncio.create_task(_watch(models, server))
        await server.serve(sockets=[listening])
        watch.cancel()

    asyncio.run(serve())
    if faults := models.faults:
        reasons = "; ".join(f"{name}: {error or type(error).__name__}" for name, error in faults.items())
        raise MarsError(f"cannot serve {reasons}")


def _on_signal(number: int, function: Callable[..., None], *arguments: object) -> None:
    """Call `function` in the running event loop at each signal."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, function, *arguments)
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(function, *arguments))


async def _watch(models: Models, server: Server) -> None:
    """End the server if a bundle cannot warm up."""
    while not models.is_ready and not models.faults:
        await asyncio.sleep(0.05)
    if models.faults:
        server.should_exit = True
    else:
        LOG.info("ready: %s", ", ".join(models.models))


def _reload(keys: Callable[[], int] | None) -> None:
    try:
        if keys is None:
            LOG.info("SIGHUP: there is no --api-key-file to read again")
        else:
            LOG.info("%d API keys", keys())
    except MarsError as error:
        LOG.error("the API keys stay as they were: %s", error)
