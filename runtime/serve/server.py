"""The server process: its socket, its connections, its signals, its shutdown and its log."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from typing import Any, get_args

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ..errors import MarsError
from .api_error import ApiError, encoded
from .models import Models
from .options import HEADER_BYTES, MAX_CONNECTIONS, LogLevel, ServeOptions


class Lines(logging.Formatter):
    """One line for each record, with the record's `fields`."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields = getattr(record, "fields", {})
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self._as_json:
            line = {
                "time": when,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": message,
            }
            return json.dumps(line | fields, ensure_ascii=True, default=str)
        pairs = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
        text = f"{when} {record.levelname.lower():7} {message} {pairs}".rstrip()
        return text.replace("\r", "\\r") if record.exc_info else text.encode("unicode_escape").decode()


def _shown(value: object) -> str:
    text = str(value)
    return text if text and " " not in text else repr(text)


def start_log(level: str, log_format: str) -> None:
    """Write the log of this package and of the HTTP server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json=log_format == "json"))
    # The batcher logs each request too, and uvicorn logs invalid HTTP, which any client can send.
    minimums = {
        "mars_export.serve": "debug",
        "mars_export": "warning",
        "uvicorn": "error",
        "asyncio": "error",
    }
    for name, minimum in minimums.items():
        logger = logging.getLogger(name)
        logger.setLevel(
            (level if level == "debug" else max(minimum, level, key=get_args(LogLevel).index)).upper()
        )
        if name != "mars_export.serve":  # it propagates to mars_export
            logger.addHandler(handler)
            logger.propagate = False


class Connection(H11Protocol):
    """A connection with the timeouts of `options`. New ones above the limit are closed."""

    def __init__(self, options: ServeOptions, **named: Any) -> None:
        super().__init__(**named)
        self._options, self._timers = options, dict[str, asyncio.TimerHandle]()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("headers")
        self._stop("write")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._stop("headers")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write", self._options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("write")

    def send_400_response(self, msg: str) -> None:
        """The response to invalid HTTP; 431 if the headers are too large."""
        self._complain(431 if len(self.conn.trailing_data[0]) > 16_384 else 400, msg)

    def _await_headers(self) -> None:
        """The time runs from the connection or the last request; one byte a second does not extend it."""
        self._start("headers", self._options.header_timeout, self._too_slow)

    def _start(self, name: str, seconds: float, end: Callable[[], None]) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, end)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _too_slow(self) -> None:
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._complain(408, f"the headers did not arrive within {self._options.header_timeout:g} s")

    def _complain(self, status: int, message: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encoded(ApiError(status, message).body)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


LOG = logging.getLogger("mars_export.serve")
LAST_WRITES = 10  # seconds for sending the rest of answers after the drain time


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; `run` has ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Reports:
    """The event loop's exception handler. Without a free file descriptor, asyncio reports thousands of failed
    attempts to accept a connection each second; this logs one a minute.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next:
            self._next = loop.time() + 60
            LOG.error("no connection can be accepted (%s); allow more open files", error.strerror)


def new_server(app: ASGIApp, options: ServeOptions) -> Server:
    """A server for a bound socket."""
    config = uvicorn.Config(
        app,
        http=partial(Connection, options),  # type: ignore[arg-type]  # it calls it
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
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(Reports())
        loop.add_signal_handler(signal.SIGHUP, _reload, reload)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        watch = asyncio.create_task(_watch(models, server))
        await server.serve(sockets=[listening])
        watch.cancel()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * MAX_CONNECTIONS)), hard))
    asyncio.run(serve())
    if faults := models.faults:
        reasons = "; ".join(f"{name}: {error or type(error).__name__}" for name, error in faults.items())
        raise MarsError(f"cannot serve {reasons}")


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
        LOG.error("the API keys are unchanged: %s", error)
