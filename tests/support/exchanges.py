"""tests/conformance/http.json as tests of a server use it: what is sent, and what an answer must be like."""

from __future__ import annotations

import json
from typing import Any

from support.paths import ROOT

EXCHANGES: list[dict[str, Any]] = json.loads((ROOT / "tests/conformance/http.json").read_text())["exchanges"]
NAMED = {exchange["name"]: exchange for exchange in EXCHANGES}
KINDS: dict[str, Any] = {"<text>": str, "<count>": int, "<number>": (int, float), "<list>": list}


def named(name: str, model: str) -> dict[str, Any]:
    """An exchange, of the server's own model."""
    return json.loads(json.dumps(NAMED[name]).replace("<model>", model))  # type: ignore[no-any-return]


def sent(exchange: dict[str, Any], model: str) -> str | None:
    """The body that is sent."""
    body = exchange.get("raw", exchange.get("body"))
    text = body if isinstance(body, str) or body is None else json.dumps(body)
    return text.replace("<model>", model) if text is not None else None


def like(found: Any, pattern: Any, where: str = "reply") -> None:
    """Assert that `found` is as `pattern` says (http.json, "about")."""
    if isinstance(pattern, str) and pattern in KINDS:
        assert isinstance(found, KINDS[pattern]) and not isinstance(found, bool), (where, found)
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


def check_stream(chunks: list[Any], pattern: dict[str, Any]) -> None:
    """Assert that the chunks before [DONE] are as `pattern` says."""
    chunks = list(chunks)
    if "usage" in pattern:
        like(chunks.pop(), pattern["usage"], "usage")
    like(chunks[0], pattern["first"], "first")
    like(chunks[-1], pattern["last"], "last")
    for i, chunk in enumerate(chunks):
        like(chunk, pattern["each"], f"chunk {i}")
        assert len(chunk["choices"]) == 1
    if pattern.get("steps"):
        steps = [step for chunk in chunks for step in chunk["choices"][0].get("steps", [])]
        assert [step["step"] for step in steps] == list(range(len(steps))) and steps
        text = "".join(token["text"] for step in steps for token in step["tokens"])
        assert text == content(chunks)
        hows = {token["how"] for step in steps for token in step["tokens"]}
        assert hows <= {"accepted", "verified", "forced"}


def check_events(events: list[Any], patterns: list[Any]) -> None:
    """Assert that the events of a typed stream are as `patterns` say; "..." is more of the last type."""
    left = list(events)
    for i, pattern in enumerate(patterns):
        if pattern != "...":
            like(left.pop(0), pattern, f"event {i}")
            continue
        while left and left[0]["type"] == patterns[i - 1]["type"]:
            like(left.pop(0), patterns[i - 1], f"event {i}")
    assert not left, left


def content(answer: Any) -> str:
    """The text of the first choice, or of a response or a message: of a whole body, or joined of chunks."""
    if isinstance(answer, list) and "type" in answer[0]:
        deltas = [event["delta"] for event in answer if event["type"].endswith("delta")]
        return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
    if isinstance(answer, dict) and "choices" not in answer:
        blocks = answer["content"] if "content" in answer else answer["output"][0]["content"]
        return "".join(block["text"] for block in blocks)
    choices = (
        [chunk["choices"][0] for chunk in answer if chunk["choices"]] if isinstance(answer, list) else None
    )
    if choices is None:
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    first = [choice for choice in choices if choice["index"] == 0]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in first)
