"""The matcher of a grammar over the tokenizer: what it forces, allows, refuses and masks."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest
from support import tiny
from support.questions import STOP, WEATHER
from support.schemas import drawn_schema

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.structured.grammar import Grammars
from mars_export.runtime.structured.matcher import leaves_a_choice
from mars_export.runtime.structured.vocabulary import Vocabulary
from mars_export.runtime.text.dialects import LIST, TAGS, Dialect
from mars_export.runtime.text.tokenizer import Text


def grammars(text: Text, dialect: Dialect = LIST) -> Grammars:
    return Grammars(Vocabulary(text.tokenizer, tiny.VOCAB_SIZE, (tiny.IM_END,)), dialect)


@pytest.mark.parametrize("text", ["plain", "é😀", "a\tb", string.punctuation, "<|mask|>", " two  spaces "])
def test_forced_text_is_what_the_tokenizer_writes(text: str, session: Session) -> None:
    assert session.text is not None
    matcher = grammars(session.text).matcher(GenerationConfig(choice=(text,)))
    forced = matcher.forced()
    assert not leaves_a_choice(matcher)
    if "<|" not in text:
        assert forced == session.text.tokenizer.encode(text, add_special_tokens=False).ids
    while forced := matcher.forced():
        for token in forced:
            assert token != tiny.MASK
            matcher.consume(token)
    assert matcher.is_over and matcher.may_end and not matcher.mask().any()


def test_a_matcher_refuses_what_may_not_follow(session: Session) -> None:
    assert session.text is not None
    matcher = grammars(session.text).matcher(GenerationConfig(choice=("ab", "cd")))
    copy = matcher.copy()
    with pytest.raises(SessionError, match="the grammar failed"):
        copy.consume(ord("x"))
    assert matcher.mask().sum() >= 2, "the original is as it was"


TAGGED = (
    ("It is late.", False),
    ("", False),
    ('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', True),
    ('Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', False),
    ('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n' * 2, True),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', False),
    ('<tool_call>\n{"name": "dance", "arguments": {}}\n</tool_call>', False),
)


@pytest.mark.parametrize(("answer", "is_right"), TAGGED)
def test_an_answer_is_calls_in_tags(answer: str, is_right: bool, session: Session) -> None:
    assert allows(GenerationConfig(tools=[WEATHER, STOP]), answer, session) is is_right


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [*TAGGED, ('{"a": 1}', True),
     ('{"b": 1}', False), ("hello", False), ("", False)],
)  # fmt: skip
def test_tagged_calls_or_a_schema(answer: str, is_right: bool, session: Session) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/one"}}, "$defs": {"one": {"const": 1}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    assert allows(GenerationConfig(schema=schema, tools=[WEATHER, STOP]), answer, session) is is_right


def allows(config: GenerationConfig, answer: str, session: Session) -> bool:
    """Whether a grammar for calls in tags allows this answer."""
    assert session.text is not None
    matcher = grammars(session.text, TAGS).matcher(config)
    for token in session.text.tokenizer.encode(answer, add_special_tokens=False).ids:
        forced = matcher.forced()
        if not (forced[0] == token if forced else matcher.mask()[token]):
            return False
        matcher.consume(token)
    return matcher.may_end


@pytest.mark.parametrize("seed", range(6))
def test_one_token_is_allowed_where_the_mask_says_so(seed: int, session: Session) -> None:
    assert session.text is not None
    draw = random.Random(seed)
    config = GenerationConfig(schema=drawn_schema(draw)) if seed else GenerationConfig(tools=[WEATHER, STOP])
    matcher = grammars(session.text, TAGS if seed % 2 else LIST).matcher(config)
    for _ in range(20):
        if forced := matcher.forced():
            matcher.consume(forced[0])
            continue
        if matcher.is_over:
            break
        asked = matcher.copy()
        asked.forced()
        one_by_one = [asked.allows(token) for token in range(tiny.VOCAB_SIZE)]
        mask = matcher.mask()
        assert one_by_one == mask.tolist() == [matcher.allows(token) for token in range(tiny.VOCAB_SIZE)]
        if not mask.any():
            break
        matcher.consume(draw.choice(np.flatnonzero(mask).tolist()))
    assert not any(matcher.allows(token) for token in (-1, tiny.VOCAB_SIZE, tiny.IM_END))
