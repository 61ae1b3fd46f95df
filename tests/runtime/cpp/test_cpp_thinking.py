"""Thinking in C++: split as in Python, and switched by the chat template's table in the example service."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.cpp_service import post, start
from support.exports import export
from support.text_driver import Driver
from support.tiny import Named

from mars_export import Chat, GenerationConfig, Session
from mars_export.runtime.bundle.turns import ThinkingMarks
from mars_export.runtime.text.thinking import ThinkingStream

PIECES = ["<think>", "</think>", "<thi", "nk>", "</", "<", ">", " ", "\u2003", "\n\n", "well", "é"]
HELLO = [{"role": "user", "content": "hi there"}]
TEMPLATE = tiny.CHAT_TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
NUM_TOKENS = 12


def test_answers_are_split_as_in_python(drivers: Callable[[str], Driver]) -> None:
    ask, draw = drivers("smollm").ask, random.Random(3)
    for _ in range(400):
        pieces = draw.choices(PIECES, k=draw.randint(0, 9))
        is_open = draw.random() < 0.5
        stream = ThinkingStream(ThinkingMarks("<think>", "</think>"), is_open=is_open)
        pairs = [*map(stream.push, pieces), stream.finish()]
        thinking, said = ("".join(part) for part in zip(*pairs, strict=True))
        size = len("".join(pieces)[: stream.num_thinking].encode())
        found = ask("thinking", open="<think>", close="</think>", is_open=is_open, pieces=pieces)
        assert found == [thinking, said, size], pieces


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Path:
    """A tiny Qwen3 that always thinks, because its prompt opens the thinking and it never ends it."""
    directory: Path = tmp_path_factory.mktemp("thinking")
    shutil.copytree(checkpoints("qwen3"), directory / "checkpoint")
    tiny.change_config(directory / "checkpoint", "tokenizer_config.json", chat_template=TEMPLATE)
    export(directory / "checkpoint", directory / "bundle", block=6)
    return directory / "bundle"


@pytest.fixture(scope="module")
def port(bundle: Path) -> Iterator[int]:
    process, port = start(bundle)
    yield port
    process.terminate()
    assert process.wait(60) == 0


def message(port: int, **fields: Any) -> tuple[str | None, str | None, dict[str, Any]]:
    """Thinking, text and the whole body; the stream says the same."""
    asked = {"messages": HELLO, "max_tokens": NUM_TOKENS, "return_steps": True, **fields}
    status, text = post(port, asked)
    assert status == 200, text
    body = json.loads(text)
    said = body["choices"][0]["message"]
    _, stream = post(port, asked | {"stream": True})
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == said.get(name, "")
    return said.get("reasoning_content"), said["content"], body


def test_thinking_is_apart_and_can_be_turned_off(bundle: Path, port: int) -> None:
    session = Session.open(bundle, threads=1, cache_bytes=0)
    config = GenerationConfig(max_new_tokens=NUM_TOKENS)
    thought = session.generate(HELLO, config).text.lstrip()
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}):
        thinking, said, body = message(port, **fields)
        assert (thinking, said) == (thought, "")
        tokens = [token for step in body["choices"][0]["steps"] for token in step["tokens"]]
        assert all(token["thinking"] for token in tokens if token["text"])
        num_thinking = sum("thinking" in token for token in tokens)
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thinking > 3
    text = session.generate(Chat(HELLO, template={"enable_thinking": False}), config).text
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        thinking, said, body = message(port, **fields)
        assert (thinking, said) == (None, text)
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_other_variables_are_refused(port: int) -> None:
    for variables in ({"enable_thinkng": False}, {"enable_thinking": "no"}):
        status, text = post(port, {"messages": HELLO, "chat_template_kwargs": variables})
        assert (status, json.loads(text)["error"]["param"]) == (400, "chat_template_kwargs")
