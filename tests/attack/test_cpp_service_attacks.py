"""Hostile clients of the C++ service beside honest ones, the short form of benchmarks/attack/service.py; and
its end under load.
"""

from __future__ import annotations

import json
import signal
import socket
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pytest
from attack import service
from support.agreement import MAIN
from support.cabi import build
from support.fixtures import Named


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    assert service.PROGRAM.is_relative_to(build())


def test_the_honest_get_their_answers_beside_twenty_kinds_of_hostile_ones(bundles: Named) -> None:
    seen = service.attack(bundles(MAIN), requests=5 * len(service.KINDS), clients=8, at_once=6, rounds=3)
    assert seen["kinds"] >= 20 and seen["honest"] >= 24
    assert (seen["wrong answers"], seen["left running"]) == (0, 0), seen
    assert set(seen["honest outcomes"]) <= {"200", "429"}, seen
    assert seen["memory"] < 2, seen  # of a process with a tiny model: the long run with a real one says 1.2
    hostile = seen["hostile outcomes"]
    assert {name for name in hostile if name.endswith(": 500")} == set()
    for name, status in (
        ("deep JSON", 400), ("a chunked flood", 411), ("gzip", 415), ("a huge header", 431),
        ("invalid UTF-8", 400), ("too many tokens", 400), ("a body beyond the limit", 413),
    ):  # fmt: skip
        assert hostile.get(f"{name}: {status}", 0) > 0, (name, hostile)


def read_all(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def stopped(bundle: Any, grace: float, **fields: Any) -> tuple[float, list[bytes]]:
    """How long the service took to end under 12 streams, and what their clients got."""
    with service.service(bundle, "--grace", str(grace), "--rows", "4") as (process, port):
        with ExitStack() as stack:
            clients = []
            for _ in range(12):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                client.sendall(service.whole(service.CHAT, service.body(stream=True, **fields)))
                clients.append(client)
            begun = [client.recv(1) for client in clients]  # each has its head: it is queued or runs
            began = monotonic()
            process.send_signal(signal.SIGTERM)
            answers = [first + read_all(client) for first, client in zip(begun, clients, strict=True)]
        assert process.wait(30) == 0
        return monotonic() - began, answers


def last_of(answer: bytes) -> dict[str, Any]:
    """The last chunk of a stream, which ends as it should."""
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[
        -300:
    ]
    events = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return json.loads(events[-1][6:])  # type: ignore[no-any-return]


def test_a_signal_under_load_lets_answers_finish_in_the_time_of_grace(bundles: Named) -> None:
    seconds, answers = stopped(bundles(MAIN), 30.0, max_tokens=24, tau=1.0)
    assert {last_of(answer)["choices"][0]["finish_reason"] for answer in answers} <= {"length", "stop"}
    assert {last_of(answer)["mars"]["finish_reason"] for answer in answers} <= {"length", "eos"}
    assert seconds < 30


def test_a_signal_under_load_ends_streams_with_their_last_chunk(bundles: Named) -> None:
    seconds, answers = stopped(bundles(MAIN), 0.01, max_tokens=400, ignore_eos=True, tau=1.0)
    reasons = [last_of(answer)["mars"]["finish_reason"] for answer in answers]
    assert "cancelled" in reasons and set(reasons) <= {"cancelled", "length"}
    assert seconds < 20  # on a busy machine; it is the step in hand and 0.01 s
