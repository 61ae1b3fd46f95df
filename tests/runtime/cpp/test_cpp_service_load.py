"""The C++ example of a service under load: who waits, who is told, what is not computed, its end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep

import pytest
from support.cpp_service import ASK, HEAD, LONG, health, post, read_all, start, text_of
from support.fixtures import Named


def test_an_answer_that_nobody_waits_for_is_not_computed(endless: Path) -> None:
    process, port = start(endless)
    whole = json.loads(post(port, LONG)[1])["usage"]["completion_tokens"]
    assert whole == 1000
    for stream in (False, True):
        before = health(port)["tokens"]
        body = json.dumps({**LONG, "stream": stream}).encode()
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        sleep(0.5)
        quiet = health(port)
        assert (quiet["running"], quiet["waiting"]) == (0, 0)
        sleep(1)
        assert health(port) == quiet  # it is over
        assert quiet["tokens"] - before < whole  # of four
    process.terminate()
    assert process.wait(60) == 0


def test_silent_and_slow_clients_take_nothing_from_the_others(bundles: Named) -> None:
    process, port = start(bundles("llama"))
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(400)
        ]
        dripping = Event()

        def drip() -> None:
            for i in range(10**6):
                for client in clients[::4]:
                    with suppress(OSError):
                        client.sendall(HEAD[i % len(HEAD) :][:1])
                if dripping.wait(0.2):
                    return

        thread = Thread(target=drip)
        thread.start()
        try:
            for _ in range(5):
                begun = monotonic()
                assert health(port)["status"] == "ok"
                assert post(port, ASK)[0] == 200
                assert monotonic() - begun < 10
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            dripping.set()
            thread.join()


def test_more_clients_than_there_are_places(endless: Path) -> None:
    process, port = start(endless)
    with ThreadPoolExecutor(65) as pool:
        asked = [pool.submit(post, port, LONG) for _ in range(64)]
        sleep(0.2)
        begun = monotonic()
        assert health(port)["status"] == "ok"
        assert monotonic() - begun < 10
        answers = [one.result() for one in asked]
    texts = {text_of(text) for status, text in answers if status == 200}
    assert len(texts) == 1
    statuses = [status for status, _ in answers]
    # 8 compute, 16 wait, the others are told at once; rows that are not yet taken are free all the same.
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 24
    assert statuses.count(429) > 0
    refused = [json.loads(text)["error"] for status, text in answers if status == 429]
    assert {error["type"] for error in refused} == {"rate_limit_error"}
    assert health(port)["refused"] == len(refused)
    assert post(port, ASK)[0] == 200
    process.terminate()
    assert process.wait(60) == 0


def test_addresses_take_turns_where_there_are_no_keys(endless: Path) -> None:
    process, port = start(endless, "--rows", "2", "--rows-per-client", "1", "--waiting", "3")
    never_ends = json.dumps({"prompt": "the onion", "tau": 1, "max_tokens": 1000, "stream": True})

    def ask(address: str, body: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=(address, 0))
        path = "/v1/completions" if body == never_ends else "/v1/chat/completions"
        connection.request("POST", path, body)
        return connection

    flood = [ask("127.0.0.2", never_ends) for _ in range(4)]
    until = monotonic() + 20
    while (now := health(port))["running"] + now["waiting"] < 4:
        assert monotonic() < until
        sleep(0.01)
    assert ask("127.0.0.2", json.dumps(ASK)).getresponse().status == 429, "the other row is none of its"
    other = ask("127.0.0.3", json.dumps(ASK)).getresponse()
    assert other.status == 200 and json.loads(other.read())["usage"]["completion_tokens"] > 0
    now = health(port)
    assert (now["running"], now["waiting"]) == (1, 3), "nobody of the others has ended"
    for connection in flood:
        connection.close()
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_under_load_end_every_answer_properly(number: int, endless: Path) -> None:
    process, port = start(endless, "--grace", "0", "--waiting", "32")
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
    with ExitStack() as stack:
        clients = []
        for i in range(20):  # 8 run, the others wait in line
            body = json.dumps({**LONG, "stream": i % 2 == 0}).encode()
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(head % (len(body), body))
            clients.append(client)
        assert clients[0].recv(1)  # the first answer has begun
        process.send_signal(number)
        answers = [read_all(client) for client in clients]
    assert process.wait(30) == 0
    answers[0] = b"H" + answers[0]
    served = [answer for answer in answers if not answer.startswith(b"HTTP/1.1 503")]
    assert all(b"Retry-After: 1\r\n" in answer for answer in answers if answer not in served)
    for answer in served:
        assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
        if b"chunked" in answer:
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"mars":{' in answer, "the last part says how it ended"
    assert any(b'"finish_reason":"cancelled"' in answer for answer in served)
