"""The exchanges that every server of ours gives (tests/conformance/http.json), held against this one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.exchanges import NAMED, check_events, check_stream, content, like, named, sent
from support.missing import need

need("uvicorn", "serve")

from support.served import Answer, Serving  # noqa: E402

MODEL = "tiny"


def call(server: Serving, exchange: dict[str, Any]) -> Answer:
    return server.call(exchange["path"], sent(exchange, MODEL), exchange["method"], exchange.get("headers"))


def chunks_of(answer: Answer) -> list[Any]:
    if answer.data.startswith(b"event:"):
        return [json.loads(line[6:]) for line in answer.data.splitlines() if line.startswith(b"data: ")]
    *chunks, done = answer.chunks
    assert done == "[DONE]"
    return chunks


def text_of(answer: Answer) -> str:
    is_stream = "event-stream" in answer.headers["content-type"]
    return content(chunks_of(answer) if is_stream else answer.json)


@pytest.mark.parametrize("name", NAMED)
def test_exchange(name: str, server: Serving) -> None:
    exchange = named(name, MODEL)
    if "structured" in exchange.get("needs", ()):
        need("llguidance", "grammar")
    answer = call(server, exchange)
    assert answer.status == exchange["status"], answer.data
    if "reply" in exchange:
        like(answer.json, exchange["reply"])
    if "stream" in exchange:
        check_stream(chunks_of(answer), exchange["stream"])
    if "events" in exchange:
        check_events(chunks_of(answer), exchange["events"])
    if "same_text_as" in exchange:
        assert text_of(answer) == text_of(call(server, NAMED[exchange["same_text_as"]]))


def test_patterns_can_fail() -> None:
    for found, pattern in [
        ({"a": 1}, {"b": 1}), (1, "<text>"), (True, "<count>"), (-1, "<count>"), ([], [1, "..."]),
        ([1, 2], [1]), (1, True), ("x", "y"), ({"a": [{"b": 1}]}, {"a": [{"b": "<text>"}]}),
    ]:  # fmt: skip
        with pytest.raises(AssertionError):
            like(found, pattern)
