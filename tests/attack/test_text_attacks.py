"""Attacks by text: templates that eat memory or time, stop strings by the thousand, prompts that cannot be,
tokenizers that panic.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.confined import confined
from tokenizers import Tokenizer

from mars_export.runtime import BundleError, SessionError
from mars_export.runtime.bundle.open import Bundle, open_bundle
from mars_export.runtime.bundle.turns import START, ChatTurns
from mars_export.runtime.text import LONGEST_STOP, MOST_STOPS, Text, TextStream, stop_matcher

Named = Callable[[str], Path]
TOKENIZER = tiny.tokenizer()
HELLO = [{"role": "user", "content": "hi"}]

GROW = "{% set n = namespace(a=[1], b=[1.0], s='ab') %}"
BOMBS = [
    # what jinja2 would compute when it compiles
    "{{ 'a' * 4000000000 }}",
    "{{ 4000000000 * 'a' }}",
    "{{ ['a'] * 4000000000 }}",
    "{{ ('%4000000000d') % 1 }}",
    "{{ '%*d' % (4000000000, 1) }}",
    "{{ 'x'|center(4000000000) }}",
    "{{ 9 ** 999999999 }}",
    "{{ 'x'|format(1)|indent(4000000000) }}",
    # when it renders
    "{{ messages[0].content * 4000000000 }}",
    "{{ 'x'.rjust(4000000000) }}",
    "{{ 'x'.zfill(4000000000) }}",
    "{{ 'x'.expandtabs(4000000000) }}",
    "{{ '{:>4000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 4000000000) }}",
    "{{ '{a:>4000000000}'.format_map({'a': 1}) }}",
    "{{ '%4000000000d'|format(1) }}",
    "{{ messages | tojson(indent=2000000000) }}",
    "{{ strftime_now('%Y' * 300000000) }}",
    "{{ strftime_now('%4000000000Y') }}",
    "{{ lipsum(n=200000) }}",
    "{{ (5).to_bytes(4000000000, 'big') }}",
    "{{ 5|round(-1000000000) }}",
    "{{ 5|round(1000000000, 'ceil') }}",
    "{{ 'x'|replace('', 'y' * 9000000)|replace('', 'y' * 9000000) }}",
    "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "{{ (range(99999)|list).__len__() and ('y' * 100000).join(range(99999)|map('string')) }}",
    "{{ ('y' * 100000) | join('z' * 100000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    GROW + "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}",
    GROW + "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s|length }}",
    GROW + "{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}{{ n.s|length }}",
    GROW + "{% for i in range(60) %}{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}{{ n.s|length }}",
    GROW + "{% for i in range(60) %}{% set n.s = [n.s, n.s]|join %}{% endfor %}{{ n.s|length }}",
    GROW + "{% for i in range(60) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}{{ n.s|length }}",
    GROW + "{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a|length }}",
    GROW + "{% for i in range(60) %}{% set n.a = n.a * 2 %}{% endfor %}{{ n.a|length }}",
    GROW
    + "{% set n.s = 'x' * 4000000 %}{% for i in range(90000) %}{% set n.a = [n.a, n.s[1:]] %}{% endfor %}",
    # values that hold themselves many times over: comparing, printing or hashing them never ends
    GROW
    + "{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    + "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    GROW + "{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}{{ {n.a: 1} }}",
    GROW + "{% for i in range(60) %}{% set n.a = {'a': n.a, 'b': n.a} %}{% endfor %}{{ n.a }}",
    GROW + "{% for i in range(60) %}{% set n.a = dict(a=n.a, b=n.a) %}{% endfor %}{{ n.a|string|length }}",
    GROW + "{% for i in range(60) %}{% set n.a = namespace(a=n.a, b=n.a) %}{% endfor %}{{ n.a }}",
    GROW + "{% for i in range(60) %}{% set n.a = namespace(a=n.a, b=n.a) %}{% endfor %}{{ n.a ~ '' }}",
    GROW
    + "{% for i in range(60) %}{% set n.a = [n.a]|map('default', 1)|list * 2 %}{% endfor %}{{ n.a == 1 }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    # what the compiler itself stumbles over
    "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "{{ " + "(" * 95 + "1" + ")" * 95 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ " + "-" * 100_000 + "1 }}",
    "x" * 1_000_000,
]
RENDER = """
import json, time
from tokenizers import Tokenizer, models
from mars_export.runtime.errors import BundleError, SessionError
from mars_export.runtime.text import Text
tokenizer, slowest = Tokenizer(models.BPE()), 0.0
for template in json.loads(open(sys.argv[1]).read()):
    start = time.perf_counter()
    try:
        text = Text(tokenizer, template).render([{"role": "user", "content": "hi"}])
        print("rendered", len(text), template[:90])
    except (BundleError, SessionError) as error:
        print("refused" if len(str(error)) < 4000 else "a long story", type(error).__name__)
    except BaseException as error:
        print("raised", type(error).__name__, template[:90])
    if time.perf_counter() - start > 6:
        print("slow", time.perf_counter() - start, template[:90])
"""


def test_templates_that_eat_memory_or_time_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bombs").write_text(json.dumps(BOMBS))
    lines = confined(RENDER, str(tmp_path / "bombs"), gigabytes=1.5, seconds=240).splitlines()
    assert [line for line in lines if not line.startswith("refused")] == []
    assert len(lines) == len(BOMBS)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\\n') %}{"
        "{ text | trim }}{% endfor %}",
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.content %}"
        "{% endfor %}{{ n.t }}",
        "{% for m in messages[::-1] %}{% if m.role == 'user' %}{{ m | tojson }}{% endif %}{% endfor %}",
        "{% set rest = messages | selectattr('role', 'equalto', 'user') | list %}{"
        "{ rest | length }}{{ rest[-1].content }}",
        "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m] %}"
        "{% endfor %}{{ n.l[-1].content }}",
        "{% macro say(m) %}{{ m.role ~ ':' ~ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{{ messages | map(attribute='content') | join('\\n') }}{{ messages | tojson(indent=4) }}",
    ],
)
def test_a_long_conversation_is_no_bomb(template: str) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 2000} for i in range(200)]
    messages.append({"role": "user", "content": "the last word"})
    assert "the last word" in Text(TOKENIZER, template).render(messages)


def test_the_table_of_turns_is_preferred_where_it_can_tell() -> None:
    turns = ChatTurns({START: {"user": "<"}}, {"user": ">"})
    text = Text(TOKENIZER, "template: {{ messages[0].content }}", turns=turns)
    assert text.render(HELLO) == "<hi>"
    assert text.render([{"role": "user", "content": "hi", "name": "x"}]) == "template: hi"
    assert text.render([{"role": "tool", "content": "hi"}]) == "template: hi"
    assert Text(TOKENIZER, None, turns=turns).render(HELLO) == "<hi>"
    with pytest.raises(SessionError, match="table does not know such a conversation"):
        Text(TOKENIZER, None, turns=turns).render([{"role": "tool", "content": "hi"}])


@pytest.mark.parametrize("stop", [["x"] * (MOST_STOPS + 1), ["y" * (LONGEST_STOP + 1)], ["ab"] * 200_000])
def test_too_many_or_too_long_stop_strings_are_refused(stop: list[str]) -> None:
    start = time.process_time()
    with pytest.raises(
        SessionError, match=f"at most {MOST_STOPS} stop strings of at most {LONGEST_STOP} characters"
    ):
        TextStream(Text(TOKENIZER, None), stop)
    assert time.process_time() - start < 0.5


LETTERS = st.text("ab", min_size=1, max_size=6)


@given(st.lists(LETTERS, max_size=5), st.text("abc", max_size=40))
def test_the_matcher_knows_what_a_search_would_find(stops: list[str], text: str) -> None:
    matcher, state = stop_matcher(tuple(stops)), 0
    for end, character in enumerate(text, 1):
        state = matcher.step(state, character)
        before = text[:end]
        assert matcher.matches[state] == max((len(s) for s in stops if before.endswith(s)), default=0)
        begun = (
            n for n in range(len(before), -1, -1) if n == 0 or any(s.startswith(before[-n:]) for s in stops)
        )
        assert matcher.depths[state] == next(begun)


def test_stop_strings_made_to_be_slow_are_not() -> None:
    stop = ["a" * (LONGEST_STOP - 1) + letter for letter in "bcdefghijklmnopq"]
    stream, token = TextStream(Text(TOKENIZER, None), stop), TOKENIZER.encode("a").ids[0]
    start = time.process_time()
    for _ in range(2000):
        assert not stream.push(token)
        stream.read()
    assert time.process_time() - start < 2
    assert stream.finish() == "a" * (LONGEST_STOP - 1)


def changed(bundle: Path, target: Path, tokenizer: str) -> Bundle:
    """The bundle with another tokenizer, as a hostile author would make it: all hashes are right."""
    opened = open_bundle(bundle)
    for file in bundle.iterdir():
        if not file.name.startswith("."):
            (target / file.name).write_bytes(file.read_bytes())
    (target / "tokenizer.json").write_text(tokenizer)
    digest = hashlib.sha256(tokenizer.encode()).hexdigest()
    files = tuple(
        dataclasses.replace(e, size=len(tokenizer.encode()), sha256=digest)
        if e.path == "tokenizer.json"
        else e
        for e in opened.manifest.files
    )
    return Bundle(target, dataclasses.replace(opened.manifest, files=files))


def test_a_tokenizer_that_panics_is_an_error_of_ours(bundles: Named, tmp_path: Path) -> None:
    document = json.loads(TOKENIZER.to_str())
    document["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    text = Text.of(changed(bundles("llama"), tmp_path, json.dumps(document)))
    stream = TextStream(text)
    ids = TOKENIZER.encode("bcda").ids
    assert [stream.push(token) for token in ids[:-1]] == [False] * 3
    for panicking in (lambda: stream.push(ids[-1]), lambda: text.decode(ids)):
        with pytest.raises(SessionError, match="tokenizer cannot decode this answer"):
            panicking()


def test_a_tokenizer_swapped_after_it_was_verified_is_refused(bundles: Named, tmp_path: Path) -> None:
    bundle = changed(bundles("llama"), tmp_path, TOKENIZER.to_str())
    assert Text.of(bundle).encode("hi")
    (tmp_path / "tokenizer.json").write_text(Tokenizer.from_str(TOKENIZER.to_str()).to_str(pretty=True))
    with pytest.raises(BundleError, match="was changed while the bundle was opened"):
        Text.of(bundle)


def test_a_prompt_is_measured_before_it_is_tokenized(bundles: Named) -> None:
    text = Text.of(open_bundle(bundles("llama")))
    for prompt in ("a" * 8_000_000, [{"role": "user", "content": "a" * 8_000_000}]):
        start = time.process_time()
        with pytest.raises(
            SessionError, match="the prompt has 8000000 characters, this bundle's context takes at most"
        ):
            text.encode(prompt)
        assert time.process_time() - start < 0.2


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "a\udfff"}]])
def test_half_a_character_is_named(prompt: object, bundles: Named) -> None:
    with pytest.raises(SessionError, match=r"lone surrogate, U\+D"):
        Text.of(open_bundle(bundles("llama"))).encode(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, object(), {"role": "user", "content": "x"}, [[1]], [None]])
def test_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(SessionError, match=r"a prompt is a text, messages or token ids|messages must be"):
        Text(TOKENIZER, tiny.CHAT_TEMPLATE).encode(prompt)  # type: ignore[arg-type]
