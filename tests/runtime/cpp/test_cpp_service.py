"""The C++ example of a service: answers to many clients, mistakes of a client, forms of HTTP, its end."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from support.cabi import build
from support.cpp_service import ASK, post, raw, read_all, text_of
from support.fixtures import Named
from support.shell import call

from mars_export import GenerationConfig, Session


def test_answers_of_several_clients_at_once(port: int, sessions: Callable[[str], Session]) -> None:
    wanted = {
        t: sessions("llama").generate(ASK["messages"], GenerationConfig(tau=t, max_new_tokens=24))
        for t in (0.3, 1.0, None)
    }

    def ask(tau: float | None) -> None:
        setting = {"exact": True} if tau is None else {"tau": tau}
        status, text = post(port, {**ASK, **setting})
        assert status == 200
        assert text_of(text) == wanted[tau].text
        assert json.loads(text)["timings"]["forwards"] == wanted[tau].stats.forwards
        status, text = post(port, {**ASK, **setting, "stream": True})
        assert text_of(text) == wanted[tau].text

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, [0.3, 1.0, None] * 4))


def test_a_port_in_use_is_named(port: int, bundles: Named) -> None:
    program = [build() / "examples/cpp_service/service", bundles("llama"), str(port), "1"]
    done = call(*program)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: cannot listen on port {port}: Address already in use\n",
    )


def test_a_client_that_goes_away_and_one_that_says_nothing(port: int) -> None:
    for text in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(text)
    assert post(port, ASK)[0] == 200


def test_a_client_that_waits_for_100_continue_and_one_without_chunks(port: int) -> None:
    body = json.dumps({**ASK, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.%d\r\nContent-Length: %d\r\n%s\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(head % (1, len(body), b"Expect: 100-continue\r\n"))
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        chunked = read_all(client)
    assert b"Transfer-Encoding: chunked" in chunked and chunked.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    plain = raw(port, head % (0, len(body), b"") + body)
    assert b"Transfer-Encoding" not in plain
    events = plain.partition(b"\r\n\r\n")[2].decode()
    assert text_of(events) == text_of(post(port, ASK)[1])
