"""One answer as it grows, from events that a test makes: calls that are cut, steps that are held back."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need

need("uvicorn", "serve")

from support import tiny  # noqa: E402

from mars_export import GenerationConfig  # noqa: E402
from mars_export.runtime.decode.event import Event  # noqa: E402
from mars_export.runtime.decode.sequence import Sequence  # noqa: E402
from mars_export.runtime.serve.requests.api_request import ApiRequest, Tools  # noqa: E402
from mars_export.runtime.serve.responses.choice import Choice, Delta  # noqa: E402
from mars_export.runtime.serve.responses.tokens import TokenStream  # noqa: E402
from mars_export.runtime.text.dialects import LIST  # noqa: E402
from mars_export.runtime.text.stream import TextStream  # noqa: E402
from mars_export.runtime.text.toolcalls import ToolStream  # noqa: E402

TWO = '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'


class Requested:
    """As much of a request as a choice knows."""

    cancelled = False
    prompt = (1, 2, 3)
    seq = SimpleNamespace(next_config=GenerationConfig())

    def cancel(self) -> None:
        self.cancelled = True


def choice(tools: Tools | None = None) -> tuple[Choice, Requested]:
    request = Requested()
    session: Any = SimpleNamespace(
        tool_stream=lambda: ToolStream(LIST), thinking_stream=lambda _: None, text=None
    )
    return Choice(0, request, ApiRequest("chat", [], {}, tools=tools), session), request  # type: ignore[arg-type]


def said(text: str, reason: Any = None) -> Event:
    return Event(text, (1,) if text else (), (0.5,) if text else (), reason)


def fed(made: Choice, text: str, size: int, reason: str = "eos") -> list[Delta]:
    pieces = [made.push(said(text[i : i + size])) for i in range(0, len(text), size)]
    return [*pieces, made.push(said("", reason))]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_calls_come_one_by_one(size: int) -> None:
    made, request = choice(Tools([], False, False))
    pieces = fed(made, TWO, size)
    assert [(c.name, c.arguments) for c in made.calls] == [("a", '{"x": 1}'), ("b", "{}")]
    assert made.finish_reason == "tool_calls" and not request.cancelled
    assert "".join(piece.text for piece in pieces) == "" == made.text
    assert [call for piece in pieces for call in piece.calls] == made.calls


@pytest.mark.parametrize("size", [1, 100])
def test_one_call_and_no_more(size: int) -> None:
    made, request = choice(Tools([], True, True))
    fed(made, TWO, size, "cancelled" if size == 1 else "eos")
    assert [c.name for c in made.calls] == ["a"] and made.finish_reason == "tool_calls"
    assert request.cancelled, "nobody waits for the second"
    assert made.text == ""
    assert made.message["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"x": 1}'}
    # Mistral's templates take nothing else.
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in made.message["tool_calls"])


@pytest.mark.parametrize("text", ["[1, 2]", '[{"name": ', "", "  ["])
def test_what_has_no_calls_is_text(text: str) -> None:
    made, _ = choice(Tools([], False, False))
    pieces = fed(made, text, 2, "eos")
    assert made.text == text == "".join(piece.text for piece in pieces)
    assert made.calls == [] and made.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["length", "deadline", "stop"])
def test_the_beginning_of_a_call_that_was_cut_is_left_out(reason: str) -> None:
    made, _ = choice(Tools([], False, False))
    fed(made, '[{"name": ', 2, reason)
    assert (made.text, made.calls) == ("", [])


@pytest.mark.parametrize("reason", ["length", "deadline", "capacity"])
def test_calls_that_were_cut_short_say_so(reason: str) -> None:
    made, _ = choice(Tools([], False, False))
    fed(made, TWO[:50], 5, reason)
    assert made.calls and made.finish_reason == "length"


def grown(stream: TextStream, part: list[int], *, is_over: bool) -> Event:
    """The event of a step that gave these tokens, which `stream` has."""
    seq = Sequence(0, [1], GenerationConfig(), (), stream)
    seq.finish_reason = "stop" if is_over else None
    return seq.event(tuple(part), (0.5,) * len(part))


@pytest.mark.parametrize("seed", range(60))
def test_steps_spell_the_answer_however_it_is_cut(seed: int) -> None:
    """Random bytes, half characters among them, in random steps, with and without a stop string."""
    draw = random.Random(seed)
    source = tiny.text(tiny.tokenizer(), None)
    whole = "".join(
        draw.choice(["the ", "é", "日本", "\U0001f600", "in", "x", "STOP" if seed % 3 else "S"])
        for _ in range(30)
    )
    ids = [*source.encode(whole), *([draw.randrange(256)] if seed % 2 else [])]
    stream, tokens = TextStream(source, ("STOP",)), TokenStream(source)
    content, texts, numbers, at = "", "", [], 0
    while at < len(ids):
        count = draw.randint(1, 5)
        part, is_over = ids[at : at + count], False
        for i, token in enumerate(part):
            if stream.push(token):
                part, is_over = part[: i + 1], True
                break
        at += count
        is_over = is_over or at >= len(ids)
        event = grown(stream, part, is_over=is_over)
        content += event.text
        for token in tokens.push(event):
            texts += token.text
            numbers.append(token.step)
            assert content.startswith(texts), "no step is told before its text"
        if is_over:
            break
    assert texts == content and sorted(numbers) == numbers
    assert sorted(set(numbers)) == list(range(numbers[-1] + 1))


@pytest.mark.parametrize("tau", [1.0, 0.0])
def test_a_step_waits_for_one_other_at_most(sessions: Sessions, tau: float) -> None:
    """The tiny model babbles half characters; a step behind one must not wait for the answer's end."""
    session = sessions(MAIN)
    tokens, given, longest, text = TokenStream(session.text), 0, 0, ""
    config = GenerationConfig(tau=tau, max_new_tokens=60, eos_ids=(), masks="full")
    for number, event in enumerate(session.stream("hi there", config)):
        ready = tokens.push(event)
        given = max(given, *(token.step + 1 for token in ready), 0)
        longest = max(longest, number + 1 - given)
        text += "".join(token.text for token in ready)
    assert "\ufffd" in text, "it babbles"
    assert text == session.generate("hi there", config).text
    assert longest <= 4, "a character has four bytes at most"
