"""Text in and out: whole characters, hidden stop strings, chat templates that can do nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import meta
from support import nasty, templates, tiny
from tokenizers import Tokenizer

from mars_export import BundleError, SessionError
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.text.stream import TextStream
from mars_export.runtime.text.tokenizer import Text

TOKENIZER = tiny.tokenizer()
TEXT = tiny.text(TOKENIZER, tiny.CHAT_TEMPLATE, None, "<|im_end|>")


def streamed(token_ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], str, int]:
    """Pieces shown one after the other, the final text, and how many tokens were taken before a stop."""
    stream, pieces = TextStream(TEXT, stop), []
    taken = 0
    for token in token_ids:
        taken += 1
        stopped = stream.push(token)
        pieces.append(stream.read())
        if stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream.text, taken


def cut(text: str, stop: Sequence[str]) -> str:
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


WORDS = st.lists(
    st.sampled_from(
        ["the ", "inner", "man", "é", "日本", "🙂", "👩‍👩‍👧", "\n", " ", "a", "b", "STOP", "ST", "ñ", "��"]
    ),
    max_size=12,
).map("".join)
STOPS = st.lists(
    st.sampled_from(["STOP", "the i", "\n\n", "本", "🙂", "aa", "ab", "aab", "abaa", "ST ", "n", "er"]),
    max_size=3,
)


@given(WORDS | st.text(max_size=20), STOPS)
def test_pieces_make_up_the_text_cut_at_the_first_stop(text: str, stop: list[str]) -> None:
    ids = TOKENIZER.encode(text).ids
    pieces, final, taken = streamed(ids, stop)
    assert "".join(pieces) == final == cut(text, stop)
    if cut(text, stop) != text:
        assert not any(s in TEXT.tokenizer.decode(ids[: taken - 1]) for s in stop), (
            "stopped at the first token that completes one"
        )
    if "�" not in text:
        assert not any("�" in piece for piece in pieces), "half a character was shown"
    for n in range(len(pieces)):
        shown = "".join(pieces[: n + 1])
        assert not any(s in shown for s in stop)
        assert cut(text, stop).startswith(shown), "text was shown that turned out to belong to a stop string"


@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_a_character_is_shown_once_it_is_whole(character: str) -> None:
    ids = [TOKENIZER.token_to_id(c) for c in TOKENIZER.pre_tokenizer.pre_tokenize_str(character)[0][0]]
    assert len(ids) == len(character.encode())
    pieces, _, _ = streamed(ids)
    assert pieces == [""] * (len(ids) - 1) + [character, ""]
    assert streamed(ids[:-1])[1] == "�"


@pytest.mark.parametrize("kind", ["llama2", "mistral"])
def test_the_end_of_a_text_is_added_once(kind: str) -> None:
    """Characters as bytes: half an emoji at the end makes the tokenizer take back the whole one before it."""
    tokenizer = nasty.KINDS[kind]()
    stream, shown = TextStream(tiny.text(tokenizer, None)), ""
    for byte in "a😀".encode() + "😀".encode()[:2]:
        stream.push(int(tokenizer.token_to_id(f"<0x{byte:02X}>")))
        shown += stream.read()
    stream.complete()
    shown += stream.finish()
    assert stream.text == shown == "a😀\ufffd\ufffd"
    assert (stream.finish(), stream.text) == ("", shown)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("run", ["80", "e2 82", "80 e2 82 ac 61", "special"])
@pytest.mark.parametrize("kind", ["llama2", "mistral", "qwen2"])
def test_the_work_for_a_token_is_bounded(kind: str, run: str) -> None:
    """Bytes that never form a character, and special tokens: the text is that of a whole decode."""
    tokenizer = nasty.KINDS[kind]()
    if run == "special":
        part = [min(tokenizer.get_added_tokens_decoder())]
    else:
        names = {0x80: "Ģ", 0xE2: "â", 0x82: "Ĥ", 0xAC: "¬", 0x61: "a"}  # in a byte-level vocabulary
        names = names if kind == "qwen2" else {byte: f"<0x{byte:02X}>" for byte in names}
        part = [tokenizer.token_to_id(names[byte]) for byte in bytes.fromhex(run)]
    ids = part * (1200 // len(part)) + tokenizer.encode("a ba", add_special_tokens=False).ids
    text = tiny.text(tokenizer, None)
    stream, shown = TextStream(text), ""
    text.tokenizer = counting = Counting(tokenizer)
    for token in ids:
        stream.push(token)
        shown += stream.read()
    assert counting.num_decoded < 200 * len(ids)
    assert shown + stream.finish() == tokenizer.decode(ids)


def test_specials_are_not_text() -> None:
    assert TEXT.tokenizer.decode([tiny.IM_START, *TOKENIZER.encode("hi").ids, tiny.IM_END]) == "hi"
    assert streamed([*TOKENIZER.encode("hi").ids, tiny.IM_END])[1] == "hi"


def test_messages_become_the_template_s_text() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    rendered = (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TEXT.render(messages) == rendered
    assert TEXT.encode(messages) == TOKENIZER.encode(rendered, add_special_tokens=False).ids
    assert TEXT.encode(messages)[0] == tiny.IM_START


def test_content_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "turn on "}, {"type": "text", "text": "the light"}]
    plain = [{"role": "user", "content": "turn on the light"}]
    assert TEXT.render([{"role": "user", "content": parts}]) == TEXT.render(plain)
    assert TEXT.render([{"role": "user", "content": tuple(parts)}]) == TEXT.render(plain)
    assert parts[0] == {"type": "text", "text": "turn on "}, "what was given is not changed"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
        ("words", "str"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 5}, "text"),
        ({"text": "words"}, "None"),
    ],
)
def test_other_content_parts_are_refused_by_place(part: object, kind: str) -> None:
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
    ]
    with pytest.raises(
        SessionError, match=f"message 1, part 1: only text parts are supported, .* not '{kind}'"
    ):
        TEXT.render(messages)


@pytest.mark.parametrize(("content", "kind"), [(None, "NoneType"), (5, "int"), ({"type": "text"}, "dict")])
def test_content_that_is_no_text_is_not_printed_as_python_spells_it(content: object, kind: str) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": content}]
    with pytest.raises(
        SessionError, match=f"message 1: content must be a text or a list of parts, not {kind}"
    ):
        TEXT.render(messages)


def test_an_unknown_role_is_said() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "alien", "content": "y"}]
    with pytest.raises(SessionError, match=r"unknown role 'alien' in message 1 \(known: .*system.*user"):
        TEXT.render(messages)
    assert "tool" in TEXT.render([{"role": "tool", "content": "5"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "|</s>"),
        (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
            "user",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é"}'),
        ("{% set x = namespace(n=0) %}{% set x.n = x.n + 1 %}{{ x.n }}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_of_real_models_use(template: str, expected: str) -> None:
    text = tiny.text(TOKENIZER, template, None, "</s>")
    assert text.render([{"role": "user", "content": "é"}, {"role": "user", "content": "b"}]) == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # What cannot reach out:
        ("{{ messages.__class__.__mro__ }}", ""),
        ("{{ ''.__class__.__base__.__subclasses__() }}", ""),
        ("{{ cycler.__init__.__globals__ }}", ""),
        ("{{ raise_exception.__globals__['os'] }}", ""),
        ("{{ strftime_now.__globals__['os'].system('true') }}", ""),
        ("{{ messages.append(1) }}", ""),
        ("{{ messages[0].update({'role': 'x'}) }}", ""),
        # What fails:
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", ""),
        ("{{ 1 / 0 }}", ""),
        ("{{ messages[9].role }}", ""),
        ("{% for i in range(1000000000) %}{% endfor %}", ""),
        ("{{ messages[0].content + 1 }}", ""),
        ("{% include 'x' %}", ""),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_session_error(template: str, said: str) -> None:
    with pytest.raises(SessionError, match=f"the chat template refuses these messages.*{said}"):
        tiny.text(TOKENIZER, template).render([{"role": "user", "content": "hi"}])


def test_a_template_of_real_size_is_parsed_for_its_settings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text, parsed = tiny.text(TOKENIZER, templates.large()), []
    find = meta.find_undeclared_variables
    monkeypatch.setattr(meta, "find_undeclared_variables", lambda tree: parsed.append(tree) or find(tree))
    for turn in range(5):
        thinking = {"enable_thinking": turn % 2 == 0}
        text.encode([{"role": "user", "content": "hi"}], template=thinking)
    assert len(parsed) == 1
    assert "enable_thinking" in text.settings


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(BundleError, match="the chat template is not valid jinja2"):
        tiny.text(TOKENIZER, "{% for %}")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": 1, "content": "hi"}],
        ["hi"],
        [{"role": "user", "content": "a"}, 3],
    ],
)
def test_messages_that_are_none(messages: list[object]) -> None:
    with pytest.raises(SessionError, match=r"messages must be a non-empty list of {role, content}"):
        TEXT.render(messages)


def test_no_chat_template() -> None:
    with pytest.raises(SessionError, match="no chat template; pass the whole prompt as one text"):
        tiny.text(TOKENIZER, None).render([{"role": "user", "content": "hi"}])


def test_a_bundle_without_a_tokenizer(bundles: Callable[[str], Path]) -> None:
    bundle = open_bundle(bundles("llama"))
    bare = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, text=None))
    assert Text.load(bare) is None
