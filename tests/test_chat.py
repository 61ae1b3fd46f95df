"""Chat templates as tables of turns: the table equals the template or is not there."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from manifests import GOOD, changed
from tokenizers import Tokenizer, models

from mars_export.exporter.chat import derive_chat_turns
from mars_export.exporter.vocabulary import Vocabulary
from mars_export.runtime.bundle import parse_manifest
from mars_export.runtime.chat import START, ChatTurns
from mars_export.runtime.errors import BundleError, CheckpointError, SessionError
from mars_export.runtime.text import Text

ALL = ("system", "user", "assistant", "tool")
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + tiny.CHAT_TEMPLATE
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n"
    "{% if m.role == 'user' %}{{ m.content | trim }}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set note = messages[0].content + '\n\n' %}"
    "{% else %}{% set rest = messages %}{% set note = '' %}{% endif %}{{ bos_token }}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first %}{{ note }}{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
THINKING = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > last.user and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ text }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
GROUPED_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
# Each with the roles of its table, and those that may end a conversation.
GOOD_ONES = {
    "chatml": (tiny.CHAT_TEMPLATE, ALL, ALL),
    "default-system": (SYSTEM_FIRST, ALL, ALL),
    "trimmed": (TRIMMED, ALL, ALL),
    "alternating": (ALTERNATING, ("system", "user", "assistant"), ("user", "assistant")),
    "no-system": (NO_SYSTEM, ("user", "assistant"), ("user", "assistant")),
    "thinking": (THINKING, ALL, ("system", "user", "tool")),
    "grouped-tools": (GROUPED_TOOLS, ALL, ALL),
}
BAD_ONES = {
    "none": None,
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "numbered": "{% for m in messages %}{{ loop.index }}: {{ m.content }}{% endfor %}",
    "shouting": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "quoted": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "counting": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "longest": "{% for m in messages %}{{ m.content }}{% if loop.index > 6 %}!{% endif %}{% endfor %}",
    "newlines": "{% for m in messages %}{% if '\n' in m.content %}>>{% endif %}{{ m.content }}{% endfor %}",
    "refusing": "{{ raise_exception('never') }}",
}


def vocabulary(template: str | None) -> Vocabulary:
    return Vocabulary("", 1, "<mask>", (2,), 2, "<s>", "</s>", template)


def text_of(template: str) -> Text:
    return Text(Tokenizer(models.BPE()), template, "<s>", "</s>")


@cache
def derived(template: str | None) -> ChatTurns | None:
    return derive_chat_turns(vocabulary(template))


@pytest.mark.parametrize("name", GOOD_ONES)
def test_templates_that_are_tables(name: str) -> None:
    template, roles, ends = GOOD_ONES[name]
    turns = derived(template)
    assert turns is not None
    assert set(turns.roles) == set(roles)
    assert set(turns.after) == set(ends)
    assert turns.trimmed == (("user",) if name == "trimmed" else ())
    assert turns.reserved == (("</think>",) if name == "thinking" else ())


@pytest.mark.parametrize("name", BAD_ONES)
def test_templates_that_are_none(name: str) -> None:
    assert derived(BAD_ONES[name]) is None


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from([*ALL, "other"]), "content": st.text(max_size=8) | st.sampled_from(["</think>", " x\n", "[INST]"])}
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("name", GOOD_ONES)
def test_a_table_never_disagrees(name: str) -> None:
    template = GOOD_ONES[name][0]
    turns, text = derived(template), text_of(template)
    assert turns is not None

    @given(MESSAGES)
    def check(messages: list[dict[str, str]]) -> None:
        ours = turns.render(messages)
        if ours is not None:
            assert ours == text.render(messages)

    check()


def test_what_a_table_does_not_know() -> None:
    turns = derived(ALTERNATING)
    assert turns is not None
    user = {"role": "user", "content": "hi"}
    assert turns.render([user]) == "<s>[INST] hi [/INST]"
    assert turns.render([{"role": "system", "content": "be kind"}, user]) == "<s>[INST] be kind\n\nhi [/INST]"
    assert turns.render([user, user]) is None
    assert turns.render([]) is None
    with pytest.raises(SessionError, match="alternate"):
        text_of(ALTERNATING).render([user, user])


def test_a_template_that_is_not_jinja_stops_the_export() -> None:
    with pytest.raises(CheckpointError, match="not valid jinja2 .*correct chat_template and export again"):
        derive_chat_turns(vocabulary("{% for %}"))


TURNS = ChatTurns({START: {"user": ""}, "user": {"user": "|"}}, {"user": "!"}, ("user",), ("</think>",))


def test_the_manifest_carries_the_table() -> None:
    assert GOOD.text is not None
    manifest = dataclasses.replace(GOOD, text=dataclasses.replace(GOOD.text, chat=TURNS))
    assert parse_manifest(manifest.to_json()) == manifest
    assert parse_manifest(changed("text.chat", ...)).text == GOOD.text, "bundles of format 1.0 have none"


WRONG_TABLES: list[tuple[str, Any, str]] = [
    ("between", [], "between: an object is expected"),
    ("between", {"start": {"user": 1}}, "between.start.user: a string is expected"),
    ("between", {"start": "user"}, "between.start: an object is expected"),
    ("between", {"user": {"user": ""}}, "no conversation can begin or end"),
    ("after", {}, "no conversation can begin or end"),
    ("after", {"user": None}, "after.user: a string is expected"),
    ("trimmed", "user", "trimmed: a list is expected"),
    ("reserved", [1], "reserved: strings are expected"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG_TABLES)
def test_a_table_that_is_wrong(field: str, value: Any, message: str) -> None:
    whole = json.loads(json.dumps(dataclasses.asdict(TURNS))) | {field: value}
    with pytest.raises(BundleError, match=f"text.chat.*{message}"):
        parse_manifest(changed("text.chat", whole))
