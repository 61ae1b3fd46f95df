"""The C++ example of a service under load: who waits, who is told, what is not computed, its end."""

from __future__ import annotations

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import pytest
from support.cpp_service import ASK, HEAD, LONG, health, post, read_all, start, text_of


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


def test_more_clients_than_there_are_places(endless: Path) -> None:
    process, port = start(endless)
    with ThreadPoolExecutor(65) as pool:
        asked = [pool.submit(post, port, LONG) for _ in range(64)]
        sleep(0.2)
        begun = monotonic()
        assert health(port)["status"] == "ok"
        assert monotonic() - begun < 2
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
