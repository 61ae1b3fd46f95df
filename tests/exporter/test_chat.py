"""Chat templates as tables of turns: the table equals the template or is not there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifests import GOOD, changed
from support.templates import (
    ALL,
    ALTERNATING,
    GOOD_ONES,
    NO_SYSTEM,
    TURNS,
    WRONG_TABLES,
    derived,
    text_of,
    vocabulary,
)
from tokenizers import Tokenizer, models

from mars_export.exporter.turns import derive_chat_turns, find_thinking
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.errors import BundleError, CheckpointError, SessionError

# Each with the roles of its table, and those that may end a conversation.
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


def test_thinking_that_turns_can_switch() -> None:
    """Only where nothing but the beginning of the answer depends on it."""
    marks = "{# <think> </think> #}"
    off = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    for source, has_on, has_off in (
        (NO_SYSTEM + off, True, True),
        (off + NO_SYSTEM, True, False),
        (NO_SYSTEM, False, False),
    ):
        plain = Tokenizer(models.BPE()).to_str()
        found = dataclasses.replace(vocabulary(marks + source), tokenizer_json=plain)
        turns = derive_chat_turns(found)
        assert turns is not None
        thinking = find_thinking(found, turns)
        assert thinking is not None
        assert thinking.on == (turns.after if has_on else None)
        expected = {role: f"{text}<think></think>" for role, text in turns.after.items()}
        assert thinking.off == (expected if has_off else None)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from([*ALL, "other"]),
            "content": st.text(max_size=8) | st.sampled_from(["</think>", " x\n", "[INST]"]),
        }
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


def test_the_manifest_carries_the_table() -> None:
    assert GOOD.text is not None
    manifest = dataclasses.replace(GOOD, text=dataclasses.replace(GOOD.text, chat=TURNS))
    assert parse_manifest(manifest.to_json()) == manifest
    assert parse_manifest(changed("text.chat", ...)).text == GOOD.text


@pytest.mark.parametrize(("field", "value", "message"), WRONG_TABLES)
def test_a_table_that_is_wrong(field: str, value: Any, message: str) -> None:
    whole = json.loads(json.dumps(dataclasses.asdict(TURNS))) | {field: value}
    with pytest.raises(BundleError, match=f"text.chat.*{message}"):
        parse_manifest(changed("text.chat", whole))
