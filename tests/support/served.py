"""A real HTTP server in a thread, on a port that is free, over sessions of a test."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from mars_export import Batcher, Session
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import Bundle
from mars_export.runtime.bundle.profiles import sha256_of
from mars_export.runtime.serve import ServeOptions, app
from mars_export.runtime.serve.middleware import Middleware
from mars_export.runtime.serve.server import Server, bind, new_server

HELLO = [{"role": "user", "content": "hi there"}]


def profiled(
    session: Session, taus: Mapping[str, float], evidence: Mapping[str, Any] | None = None
) -> Bundle:
    """The session's bundle with these profiles, and a stale one."""
    manifest, variant = session.bundle.manifest, session.variant
    graph = sha256_of(manifest, variant.file)
    assert graph is not None

    def profile(name: str, tau: float, of: str) -> Profile:
        return Profile(name, tau, "probability", variant.name, of, evidence or {}, masks="full")

    profiles = (*(profile(name, tau, graph) for name, tau in taus.items()), profile("stale", 0.5, "0" * 64))
    return Bundle(session.bundle.path, replace(manifest, profiles=profiles))


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def chunks(self) -> list[Any]:
        """The chunks of a stream, "[DONE]" as it stands."""
        lines = [line for line in self.data.decode().split("\n\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), lines
        said = [line.removeprefix("data: ") for line in lines]
        return [line if line == "[DONE]" else json.loads(line) for line in said]


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs."""

    port: int
    door: Middleware
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def batcher(self) -> Batcher:
        [model, *_] = self.door.service.models.opened.values()
        assert model.batcher is not None
        return model.batcher

    def call(
        self, path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request. A body that is no text and no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = body if isinstance(body, str | bytes | None) else json.dumps(body)
            given = {"content-type": "application/json"} | dict(headers or {})
            connection.request(method or ("GET" if body is None else "POST"), path, data, given)
            reply = connection.getresponse()
            return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> Answer:
        headers = fields.pop("headers", None)
        return self.call("/v1/chat/completions", {"messages": HELLO, **fields}, headers=headers)

    def raw(self, data: bytes, seconds: float = 10, *, pause: float = 0) -> bytes:
        """What the server says to these bytes until it closes; with `pause`, byte by byte."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            try:
                for piece in [data] if not pause else [data[i : i + 1] for i in range(len(data))]:
                    connection.sendall(piece)
                    time.sleep(pause)
            except OSError:
                pass  # it was closed meanwhile: what it said is there
            said = b""
            try:
                while piece := connection.recv(65536):
                    said += piece
            except OSError:
                pass
            return said

    def metric(self, name: str, **labels: str) -> float:
        return self.door.service.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def serving(
    sessions: Mapping[str, Session], options: ServeOptions | None = None, *, warm: bool = True
) -> Iterator[Serving]:
    """A server over `sessions`, and with `warm` one that is ready."""
    options = options or ServeOptions()
    door = app(sessions, options)
    listening = bind("127.0.0.1", 0)
    server = new_server(door, options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not server.started or (warm and not door.service.models.is_ready):
            assert time.monotonic() < until and thread.is_alive(), door.service.models.faults
            time.sleep(0.005)
        yield Serving(listening.getsockname()[1], door, server)
    finally:
        door.service.models.close(0)
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server does not end"


def until(condition: Any, seconds: float = 10) -> None:
    """Wait for something that is about to be so."""
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "it did not come to pass"
        time.sleep(0.002)


@contextmanager
def talking(server: Serving, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A chat's answer as it comes: its status and headers are there."""
    headers = {"content-type": "application/json"} | fields.pop("headers", {})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        body = json.dumps({"messages": HELLO, "stream": True, **fields})
        connection.request("POST", "/v1/chat/completions", body, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def chat(client: Any, **fields: Any) -> Any:
    """An answer of the model `tiny` to OpenAI's own client."""
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, **fields}
    return client.chat.completions.create(**given)


def digest(key: str) -> str:
    """The client of a key, as the log has it."""
    return sha256(key.encode()).hexdigest()[:16]
