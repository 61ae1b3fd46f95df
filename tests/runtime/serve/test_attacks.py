"""What a stranger may send: every one of these gets an answer of the 400s or a closed connection, none a 500,
and the server answers the next client.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.missing import need
from support.stalling import paced

need("uvicorn", "serve")

from support.served import HELLO, Serving, serving, talking, until  # noqa: E402

from mars_export import Session  # noqa: E402
from mars_export.runtime.serve import ServeOptions, options  # noqa: E402
from mars_export.runtime.serve.requests.api_request import TABLES  # noqa: E402

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
QUICK = ServeOptions(header_timeout=0.4, body_timeout=0.4, write_timeout=0.3, keep_alive=0.6, max_body=20_000)


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Serving]:
    with serving({"tiny": session}, QUICK) as running:
        yield running


@pytest.fixture(autouse=True)
def _the_next_client_is_answered(server: Serving) -> Iterator[None]:
    yield
    assert server.chat(max_tokens=1).status == 200
    assert server.call("/health").status == 200


def status(said: bytes) -> int:
    """Of the answer, 0 where the connection was closed without one."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", said)
    return int(found[1]) if found else 0


# --- too slow ---


def test_headers_that_come_byte_by_byte(server: Serving) -> None:
    began = time.monotonic()
    said = server.raw(CHAT * 9, pause=0.02)
    assert status(said) == 408 and b'"error"' in said
    assert time.monotonic() - began < 5


def test_a_second_request_that_comes_slowly(server: Serving) -> None:
    said = server.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HT")
    assert status(said) == 200  # what follows is closed with the idle connection, at the latest
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        said = b""
        while b'{"status":"ok"}' not in said:
            said += connection.recv(65536)
        connection.sendall(b"GET /hea")
        assert b" 408 " in connection.recv(65536)
    assert time.monotonic() - began < 5


def test_a_body_that_comes_slowly(server: Serving) -> None:
    said = server.raw(CHAT + b'content-length: 500\r\n\r\n{"messages":')
    assert status(said) == 408 and b"connection: close" in said


def test_a_client_that_does_not_read(session: Session) -> None:
    slow, pace = paced(session)
    with serving({"tiny": slow}, QUICK) as server:
        pace.hold()
        pace.let(1)
        with talking(server, max_tokens=100) as answer:
            answer.readline()
            [connection] = server.server.server_state.connections
            connection.loop.call_soon_threadsafe(connection.pause_writing)  # as when its buffers are full
            until(lambda: server.batcher.counts.cancelled == 1)
            pace.open()


# --- too much ---


@pytest.mark.parametrize("name", ["path", "header", "headers", "name"])
def test_huge_heads(name: str, server: Serving) -> None:
    size = options.HEADER_BYTES + 1000
    head = {
        "path": b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        "header": CHAT + b"x: " + b"a" * size + b"\r\n\r\n",
        "headers": CHAT + b"x: y\r\n" * size + b"\r\n",
        "name": CHAT + b"a" * size + b": y\r\n\r\n",
    }[name]
    assert status(server.raw(head)) == 431
    assert status(server.raw(head[: options.HEADER_BYTES + 500])) == 431


def test_bodies_that_are_too_large(server: Serving) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 20_000}]})
    for large in (body, body * 3):
        assert server.call("/v1/chat/completions", large).status == 413
    said = server.raw(CHAT + b"content-length: 99999999999\r\n\r\n" + b"a" * 100)
    assert status(said) == 413, "refused before it comes"
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    said = server.raw(CHAT + b"transfer-encoding: chunked\r\n\r\n" + chunk * 40)
    assert status(said) == 413


def test_an_expectation_is_refused_before_the_body(server: Serving) -> None:
    said = server.raw(CHAT + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
    assert status(said) == 413


def test_too_many_connections(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.serve.server.MAX_CONNECTIONS", 3)
    with serving({"tiny": session}) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
        until(lambda: len(server.server.server_state.connections) == 3)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as further:
            further.settimeout(5)
            with suppress(ConnectionResetError):
                assert further.recv(100) == b""
        for connection in idle:
            connection.close()
        until(lambda: not server.server.server_state.connections)
        assert server.chat(max_tokens=1).status == 200


@pytest.mark.parametrize(
    "body",
    [
        "[" * 19_000,
        '{"a":' * 3_000,
        '{"messages": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_schema",'
        ' "json_schema": {"schema": ' + '{"items": ' * 70 + "{}" + "}" * 70 + "}}}",
        '{"messages": [{"role": "user", "content": "hi"}], "tools": ' + "[" * 60 + "]" * 60 + "}",
    ],
)
def test_deep_json(body: str, server: Serving) -> None:
    assert server.call("/v1/chat/completions", body).status == 400


# --- not what it should be ---


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe\x00", b'{"messages": "\xc3\x28"}', b"\x00" * 100, b"{" * 100,
        b'{"messages": \xed\xa0\x80}',
        b'{"a": ' + b"9" * 6000 + b"}", b'{"tau": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"max_tokens": 99999999999999999999999, "messages": [{"role": "user", "content": "x"}]',
        b'{"seed": 1e3, "messages": [{"role": "user", "content": "x"}]}', b'"text"',
        b"null", b"1", b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object(body: bytes, server: Serving) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/mars/streams/x"):
        answer = server.call(path, body)
        assert 400 <= answer.status < 500, answer.data
        assert answer.json["error"]["message"]


JUNK: list[Any] = [None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", [], [None], {}, {"a": 1}, [[1]], [{}]]


@pytest.mark.parametrize("field", sorted({*TABLES["chat"], *TABLES["text"], "\ud800"}))
def test_any_value_in_any_field(field: str, server: Serving) -> None:
    for path, given in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        for value in JUNK:
            answer = server.call(path, json.dumps({"max_tokens": 1} | given | {field: value}))
            assert answer.status < 500, (path, field, value, answer.data)


@pytest.mark.parametrize("value", JUNK)
def test_any_value_in_messages_and_tools(value: Any, server: Serving) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies = [
        {"messages": [value]}, {"messages": [{"role": value, "content": "x"}]},
        {"messages": [{"role": "user", "content": value}]},
        {"messages": [{"role": "user", "content": [value]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": value}]}]},
        {"messages": [{"role": "assistant", "tool_calls": value}]},
        {"messages": [{"role": "assistant", "tool_calls": [value]}]},
        {"messages": [{"role": "assistant", "tool_calls": [call | {"function": value}]}]},
        {"messages": [{"role": "user", "content": "x", "name": value}]},
        {"messages": HELLO, "tools": [value]}, {"messages": HELLO, "tools": [tool | {"function": value}]},
        {"messages": HELLO, "tools": [tool], "tool_choice": {"type": "function", "function": value}},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": value}}]},
        {"messages": HELLO, "tools": [tool | {"function": {"name": "f", "parameters": value}}]},
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": value}}},
        {"messages": HELLO, "response_format": {"type": value}},
        {"messages": HELLO, "stream_options": {"include_usage": value}, "stream": True},
    ]  # fmt: skip
    for body in bodies:
        for choice in ("auto", "required"):
            given = {"max_tokens": 1, **({"tool_choice": choice} if "tools" in body else {}), **body}
            answer = server.call("/v1/chat/completions", json.dumps(given))
            assert answer.status < 500, (body, answer.data)
            assert answer.status == 200 or answer.json["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1//models", "/v1/models/%00", "/v1/mars/streams/../../models", "/page.html", "/v1/models/",
        "/.env", "/%ff%fe", "/%", "/?" + "a=" * 3000, "/v1/models/%ed%a0%80", "/docs", "/openapi.json", "/*",
        "/\\..\\x",
    ],
)  # fmt: skip
def test_paths(path: str, server: Serving) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "TRACE", "CONNECT"):
        said = server.raw(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
        )
        assert 400 <= status(said) < 500 or (path.startswith("/?") and method == "GET"), said
        assert b"root:" not in said


def test_a_malformed_body_leaves_no_traceback(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn closes the connection before the request is answered, which does not take its body."""
    for head in (b"GET /health HTTP/1.1\r\nhost: x\r\n", CHAT + b"origin: http://y\r\n"):
        assert status(server.raw(head + b"transfer-encoding: chunked\r\n\r\nzz\r\n")) == 400
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
        CHAT + b"content-length: -1\r\n\r\n", CHAT + b"content-length: x\r\n\r\n",
        CHAT + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}", CHAT + b"transfer-encoding: gzip\r\n\r\n",
        CHAT + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        CHAT + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n", 
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        CHAT + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b",
        b"GET /\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: \xff\r\nconnection: close\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_bytes_that_are_no_request(data: bytes, server: Serving) -> None:
    said = server.raw(data, seconds=3)
    is_harmless = b"\xff" in data  # a header may hold such a byte
    assert 400 <= status(said) < 500 or (is_harmless and status(said) == 200), said


def test_a_second_request_in_a_body_is_not_one(server: Serving) -> None:
    """A length and chunks at once are where proxies and servers disagree."""
    inner = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    said = server.raw(
        CHAT + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + inner, seconds=3
    )
    assert b"mars_num_requests" not in said
