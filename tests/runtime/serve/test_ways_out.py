"""However a request ends, whole or not and at any stage, nothing of it is left: no row, no place, no user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from support.missing import need
from support.stalling import Gate, Paced

need("uvicorn", "serve")

from support.served import HELLO, Serving, serving, talking, until  # noqa: E402

from mars_export import Batcher, GenerationConfig, Limits, Session, SessionError  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402

LONG: dict[str, Any] = {"max_tokens": 400, "tau": 1.0}


@contextmanager
def emptied(session: Session, **limits: int) -> Iterator[Serving]:
    """A server that has nothing left of its requests at the end."""
    with serving({"tiny": session}, ServeOptions(Limits(**limits))) as server:
        yield server
        [model] = server.door.service.models.opened.values()
        until(lambda: model.users == 0)
        until(lambda: server.batcher.num_running + server.batcher.num_waiting == 0)
        assert not server.door.service.streams and not server.batcher._admission._clients
        assert server.chat(max_tokens=2).status == 200, "and it goes on"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_while_its_prompt_is_processed(
    stream: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emptied(session) as server:
        gate = Gate(monkeypatch, Batcher, "_new_request")
        body = json.dumps({"messages": HELLO, "stream": stream, **LONG}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(server.raw, head % len(body) + body, 0.2)  # it waits for 0.2 s
            assert gate.reached.wait(30)
            assert said.result() == b""
            gate.is_open.set()
        until(lambda: server.batcher.counts.cancelled == 1)


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_leaves_while_it_waits_for_a_row(n: int, slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with emptied(session, max_rows=1, max_waiting=4) as server, ThreadPoolExecutor(1) as pool:
        pace.hold()
        first = pool.submit(server.chat, max_tokens=3)
        until(lambda: pace.is_waiting)
        body = json.dumps({"messages": HELLO, "n": n, "temperature": 1.0, **LONG}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        assert server.raw(head % len(body) + body, 0.2) == b""
        until(lambda: server.batcher.counts.cancelled == n)  # while the step of the first one hangs
        pace.open()
        assert first.result().status == 200


def test_a_client_leaves_all_answers_of_a_stream(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with emptied(session, max_rows=2) as server:
        pace.hold()
        pace.let(2)
        with talking(server, n=4, temperature=1.0, **LONG) as answer:
            assert answer.readline().startswith(b"data: ")
            until(lambda: pace.is_waiting)
        until(lambda: server.batcher.counts.cancelled == 4)  # two of them without a row
        pace.open()


@pytest.mark.parametrize("stream", [False, True])
def test_one_of_four_answers_fails(
    stream: bool, slow: tuple[Session, Paced], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, pace = slow
    real, made = Session.new_sequence, 0

    def panic(_: int) -> bool:
        raise SessionError("the third answer cannot be decoded")

    def new_sequence(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        seq = real(*arguments, **named)
        made += 1
        if made == 3:
            seq.stream.push = panic
        return seq

    with emptied(session, max_rows=4) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Session, "new_sequence", new_sequence)
        pace.hold()
        accepted = server.batcher.counts.accepted
        asked = pool.submit(server.chat, n=4, temperature=1.0, stream=stream, **LONG)
        # Else the third could fail before the fourth is asked for.
        until(lambda: server.batcher.counts.accepted == accepted + 4)
        pace.open()
        answer = asked.result()
        until(lambda: (server.batcher.counts.failed, server.batcher.counts.cancelled) == (1, 3))
        error = answer.chunks[-1]["error"] if stream else answer.json["error"]
        assert "third answer" in error["message"] and answer.status == (200 if stream else 400)
        assert server.metric("mars_requests_total", model="tiny", outcome="failed") == 1


def test_the_first_gate_that_can_refuses_and_leaves_nothing(slow: tuple[Session, Paced]) -> None:
    """The gates behind the model, in the order of docs/architecture.md."""
    session, pace = slow
    gates: list[tuple[dict[str, Any], int, str]] = [
        ({"tau": 0.5, "exact": True}, 400, "exact"),
        ({"logit_bias": {"99999999": 1}}, 400, "token ids of this bundle"),
        ({"max_tokens": 501}, 400, "this service allows at most 500"),
        ({}, 429, "requests wait already"),
        ({"messages": [{"role": "user", "content": "hi " * 400}]}, 400, "the prompt has"),
        ({"chat_template_kwargs": {"unknown": 1}}, 400, "has no variable 'unknown'"),
    ]
    limits = {"max_rows": 1, "max_waiting": 1, "max_new_tokens": 500, "max_prompt_tokens": 200}
    with emptied(session, **limits) as server, ThreadPoolExecutor(2) as pool:
        pace.hold()
        others = [pool.submit(server.chat, max_tokens=3) for _ in range(2)]
        until(lambda: server.batcher.counts.accepted == 3)  # and that of the warm-up
        for i, (_, status, words) in enumerate(gates):
            if status == 429:
                refused = server.chat(**gates[-1][0])
                assert refused.status == 429 and words in refused.json["error"]["message"]
                pace.open()
                assert [other.result().status for other in others] == [200, 200]
                continue
            later = {name: value for fields, _, _ in gates[i:] for name, value in fields.items()}
            if i > 3:
                later = gates[i][0]
            for stream in (False, True):
                answer = server.chat(stream=stream, **later)
                assert answer.status == status and words in answer.json["error"]["message"], answer.data


def test_a_prompt_is_tokenized_once_and_each_config_is_checked_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized, checked = [], []
    assert session.text is not None
    encode, check = session.text.encode, Session.check
    monkeypatch.setattr(session.text, "encode", lambda *a: tokenized.append(a) or encode(*a))

    def checking(self: Session, config: GenerationConfig) -> None:
        checked.append(config.seed)
        check(self, config)

    monkeypatch.setattr(Session, "check", checking)
    with emptied(session) as server:
        checked.clear()
        answer = server.chat(n=4, temperature=1.0, seed=7, max_tokens=3)
        assert answer.json["usage"]["completion_tokens"] >= 4
        assert len(tokenized) == 1 and checked == [7, 8, 9, 10]
