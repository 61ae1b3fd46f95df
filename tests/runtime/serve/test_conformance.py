"""The exchanges that every server of ours gives (tests/conformance/http.json), held against this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.paths import ROOT

need("uvicorn", "serve")

from support.served import Answer, Serving, serving  # noqa: E402

EXCHANGES: list[dict[str, Any]] = json.loads((ROOT / "tests/conformance/http.json").read_text())["exchanges"]
NAMED = {exchange["name"]: exchange for exchange in EXCHANGES}


@pytest.fixture(scope="module")
def server(sessions: Sessions) -> Iterator[Serving]:
    with serving({"tiny": sessions(MAIN)}) as running:
        yield running


def like(found: Any, pattern: Any, where: str = "reply") -> None:
    """Assert that `found` is as `pattern` says."""
    kinds: dict[Any, Any] = {"<text>": str, "<count>": int, "<number>": (int, float), "<list>": list}
    if isinstance(pattern, str) and pattern in kinds:
        assert isinstance(found, kinds[pattern]) and not isinstance(found, bool), (where, found)
        assert pattern != "<count>" or found >= 0, where
    elif isinstance(pattern, dict):
        assert isinstance(found, dict), (where, found)
        for name, value in pattern.items():
            assert name in found, f"{where}: no {name} in {found}"
            like(found[name], value, f"{where}.{name}")
    elif isinstance(pattern, list):
        assert isinstance(found, list), (where, found)
        patterns = [pattern[0]] * max(1, len(found)) if pattern[1:] == ["..."] else pattern
        assert len(found) == len(patterns), (where, found)
        for i, value in enumerate(patterns):
            like(found[i], value, f"{where}[{i}]")
    else:
        assert found == pattern and isinstance(found, bool) == isinstance(pattern, bool), (where, found)


def sent(server: Serving, exchange: dict[str, Any]) -> Answer:
    body = exchange.get("raw", exchange.get("body"))
    text = body if isinstance(body, str) or body is None else json.dumps(body)
    text = text.replace("<model>", "tiny") if text is not None else None
    return server.call(exchange["path"], text, exchange["method"], exchange.get("headers"))


def content(answer: Answer) -> str:
    """Of the first choice, joined where it is streamed."""
    if "event-stream" not in answer.headers["content-type"]:
        [choice, *_] = answer.json["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    parts = [c["choices"][0]["delta"].get("content") for c in answer.chunks[:-1] if c["choices"]]
    return "".join(part or "" for part in parts)


def check_stream(chunks: list[Any], pattern: dict[str, Any]) -> None:
    assert chunks.pop() == "[DONE]"
    if "usage" in pattern:
        like(chunks.pop(), pattern["usage"], "usage")
    like(chunks[0], pattern["first"], "first")
    like(chunks[-1], pattern["last"], "last")
    for i, chunk in enumerate(chunks):
        like(chunk, pattern["each"], f"chunk {i}")
        assert len(chunk["choices"]) == 1
    if pattern.get("steps"):
        steps = [step for chunk in chunks for step in chunk["choices"][0].get("steps", [])]
        assert [step["step"] for step in steps] == list(range(len(steps)))
        text = "".join(token["text"] for step in steps for token in step["tokens"])
        assert text == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert {token["how"] for step in steps for token in step["tokens"]} <= {
            "accepted",
            "verified",
            "forced",
        }


@pytest.mark.parametrize("name", NAMED)
def test_exchange(name: str, server: Serving) -> None:
    exchange = json.loads(json.dumps(NAMED[name]).replace("<model>", "tiny"))
    if "structured" in exchange.get("needs", ()):
        need("llguidance", "grammar")
    answer = sent(server, exchange)
    assert answer.status == exchange["status"], answer.data
    if "reply" in exchange:
        like(answer.json, exchange["reply"])
    if "stream" in exchange:
        check_stream(answer.chunks, exchange["stream"])
    if "same_text_as" in exchange:
        assert content(answer) == content(sent(server, NAMED[exchange["same_text_as"]]))


def test_patterns_can_fail() -> None:
    for found, pattern in [
        ({"a": 1}, {"b": 1}), (1, "<text>"), (True, "<count>"), (-1, "<count>"), ([], [1, "..."]),
        ([1, 2], [1]), (1, True), ("x", "y"), ({"a": [{"b": 1}]}, {"a": [{"b": "<text>"}]}),
    ]:  # fmt: skip
        with pytest.raises(AssertionError):
            like(found, pattern)
