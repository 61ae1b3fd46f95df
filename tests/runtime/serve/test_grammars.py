"""Grammars of requests: while one compiles the others are answered, and the same one compiles once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.stalling import Gate

need("uvicorn", "serve")
need("llguidance", "grammar")

from support.served import Answer, Serving, serving  # noqa: E402

from mars_export import Limits, Session  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402
from mars_export.runtime.structured.grammar import Grammars  # noqa: E402

MAX_SECONDS = 60


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch, Grammars, "_compile")
    yield made
    made.is_open.set()


@pytest.fixture
def server(sessions: Sessions, gate: Gate) -> Iterator[Serving]:  # noqa: ARG001  # before it is warm
    session = sessions(MAIN)
    with serving(
        {"tiny": Session(session.bundle, session.variant, session.backend, session.text)}
    ) as running:
        yield running


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def test_the_first_grammar_and_special_token_stop_nobody(sessions: Sessions) -> None:
    """Their tables hold the GIL while they are built, so a server builds them before it is ready."""
    session = sessions(MAIN)
    fresh = Session(session.bundle, session.variant, session.backend, session.text)
    with serving({"tiny": fresh}):
        assert fresh.text is not None and fresh.text._plain is not None
        assert "_renamed" in vars(fresh.text._plain) and "_grammars" in vars(fresh._grammar_states)


def test_others_are_answered_while_a_grammar_compiles(server: Serving, gate: Gate) -> None:
    schema = {"enum": ["one", "two"]}
    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(server.chat, response_format=form(schema), max_tokens=20) for _ in range(2)]
        assert gate.reached.wait(MAX_SECONDS)
        for _ in range(3):
            plain = server.chat(max_tokens=4)
            assert plain.status == 200, plain.data
            assert server.call("/health").status == 200
        assert not any(one.done() for one in waiting)
        gate.is_open.set()
        answers = [one.result(MAX_SECONDS) for one in waiting]
    texts = [answer.json["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] and texts[0] in ('"one"', '"two"')
    begun = gate.begun
    assert server.chat(response_format=form(schema), max_tokens=20).status == 200
    assert gate.begun == begun, "it was kept"


def test_who_waits_to_compile_has_a_place_and_a_turn(sessions: Sessions, gate: Gate) -> None:
    made = sessions(MAIN)
    session = Session(made.bundle, made.variant, made.backend, made.text)
    options = ServeOptions(Limits(max_rows=1, max_waiting=4), queue_timeout=1.0, keys=("many", "one"))

    def ask(number: int, key: str = "many") -> Answer:
        return server.chat(
            response_format=form({"const": number}), max_tokens=9, headers={"authorization": f"Bearer {key}"}
        )

    with serving({"tiny": session}, options) as server, ThreadPoolExecutor(9) as clients:
        answers = list(clients.map(ask, range(8)))
        gate.is_open.set()
    assert sorted(answer.status for answer in answers) == [429] * 8
    assert sum(b"max_waiting" in answer.data for answer in answers) == 3
    assert sum(b"its grammar was not processed within 1 s" in answer.data for answer in answers) == 5
