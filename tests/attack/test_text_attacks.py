"""Attacks by text: templates that say too much, stop strings by the thousand, prompts that cannot be,
tokenizers that panic.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support import tiny
from support.fixtures import Named, Sessions
from support.manifests import rehash

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.bundle.turns import START, ChatTurns
from mars_export.runtime.text.stream import MAX_STOP, MAX_STOPS, TextStream
from mars_export.runtime.text.tokenizer import Text

TOKENIZER = tiny.tokenizer()
HELLO = [{"role": "user", "content": "hi"}]


def test_a_template_s_text_has_a_limit() -> None:
    template = "{% for i in range(999) %}" + "x" * 100_000 + "{% endfor %}"
    with pytest.raises(SessionError, match="its text has more than 64000000"):
        tiny.text(TOKENIZER, template).render(HELLO)


def test_the_table_of_turns_is_preferred_where_it_can_tell() -> None:
    turns = ChatTurns({START: {"user": "<"}}, {"user": ">"})
    text = tiny.text(TOKENIZER, "template: {{ messages[0].content }}", chat=turns)
    assert text.render(HELLO) == "<hi>"
    assert text.render([{"role": "user", "content": "hi", "name": "x"}]) == "template: hi"
    tool = [
        {"role": "tool", "content": "hi"}
    ]  # neither has that role: a user's turn, with the bundle's words
    assert text.render(tool) == '<The results are:\n{"result": "hi"}>'
    assert tiny.text(TOKENIZER, None, chat=turns).render(HELLO) == "<hi>"
    with pytest.raises(SessionError, match="table does not cover this conversation"):
        tiny.text(TOKENIZER, None, chat=turns).render([{"role": "system", "content": "hi"}])


@pytest.mark.parametrize("stop", [["x"] * (MAX_STOPS + 1), ["y" * (MAX_STOP + 1)], ["ab"] * 200_000])
def test_too_many_or_too_long_stop_strings_are_refused(stop: list[str]) -> None:
    start = time.process_time()
    with pytest.raises(
        SessionError, match=f"at most {MAX_STOPS} stop strings of at most {MAX_STOP} characters"
    ):
        TextStream(tiny.text(TOKENIZER, None), stop)
    assert time.process_time() - start < 0.5


def test_stop_strings_made_to_be_slow_are_not() -> None:
    stop = ["a" * (MAX_STOP - 1) + letter for letter in "bcdefghijklmnopq"]
    stream, token = TextStream(tiny.text(TOKENIZER, None), stop), TOKENIZER.encode("a").ids[0]
    start = time.process_time()
    for _ in range(2000):
        assert not stream.push(token)
        stream.read()
    assert time.process_time() - start < 2
    assert stream.finish() == "a" * (MAX_STOP - 1)


def test_a_tokenizer_that_panics_is_an_error_of_ours(path: Path) -> None:
    document = json.loads(TOKENIZER.to_str())
    document["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    (path / "tokenizer.json").write_text(json.dumps(document))
    rehash(path)
    text = Text.load(open_bundle(path))
    stream = TextStream(text)
    ids = TOKENIZER.encode("bcda").ids
    assert [stream.push(token) for token in ids[:-1]] == [False] * 3
    with pytest.raises(SessionError, match="tokenizer cannot decode this answer"):
        stream.push(ids[-1])


def test_a_request_is_checked_before_a_step_runs(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = sessions("llama")
    session = Session(opened.bundle, opened.variant, opened.backend, opened.text)
    monkeypatch.setattr(opened.backend, "step", lambda *_: pytest.fail("a step ran"))
    prompt, stops = "a" * 8_000_000, GenerationConfig(stop=("x",) * 50_000)
    for ask in (session.generate, session.stream, session.conversation().send):
        with pytest.raises(SessionError, match="characters, this bundle's context holds at most"):
            ask(prompt)
        with pytest.raises(SessionError, match="at most 16 stop strings"):
            ask("hi", stops)


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "a\udfff"}]])
def test_half_a_character_is_named(prompt: object, bundles: Named) -> None:
    with pytest.raises(SessionError, match=r"lone surrogate, U\+D"):
        Text.load(open_bundle(bundles("llama"))).encode(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, object(), {"role": "user", "content": "x"}, [[1]], [None]])
def test_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(SessionError, match=r"a prompt is a text, messages or token ids|messages must be"):
        tiny.text(TOKENIZER, tiny.CHAT_TEMPLATE).encode(prompt)  # type: ignore[arg-type]
