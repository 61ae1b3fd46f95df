"""Talks in turns: what was said is not read again, and the context's end is no surprise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from support import tiny
from support.fixtures import Exported

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.decode.backend import StepOutput
from mars_export.runtime.session.conversation import Conversation
from mars_export.runtime.text.tokenizer import Text

PLENTY = 1 << 30
CONFIG = GenerationConfig(max_new_tokens=10, masks="full")
TEXT = tiny.text(tiny.tokenizer(), tiny.CHAT_TEMPLATE, None, "<|im_end|>")
Open = Callable[..., Session]


@pytest.fixture(scope="module")
def opened(exported: Exported) -> Open:
    return lambda cache_bytes=PLENTY, context=512: Session.open(
        exported(replace(tiny.WIDE, rewritten={"max_position_embeddings": context})),
        threads=1,
        cache_bytes=cache_bytes,
    )


def said(talk: Conversation, text: str, config: GenerationConfig = CONFIG) -> Any:
    reply = talk.send(text, config)
    for _ in reply:
        pass
    return reply.completion


def test_the_second_turn_reads_its_question_and_no_more(opened: Open) -> None:
    talk = opened().conversation(system="be the inner man")
    first = said(talk, "who is there?")
    second = said(talk, "and then?")
    whole = first.stats.prompt_tokens + len(first.token_ids)
    assert whole - 8 <= second.stats.cached_tokens <= whole, "all but what the last step accepted"
    assert second.stats.prompt_tokens > whole


class Scripted:
    """Answers with these tokens, at once."""

    def __init__(self, ids: list[int], reason: str) -> None:
        shown = tuple(ids[:-1]) if reason == "eos" else tuple(ids)
        text = TEXT.tokenizer.decode(shown)
        self.completion = SimpleNamespace(text=text, token_ids=tuple(ids), finish_reason=reason)
        self.is_over, self.failed = True, False

    def close(self) -> None:
        pass


THE = [TEXT.tokenizer.token_to_id(c) for c in "the"]  # the tokenizer itself says `the` in two tokens


def scripted(answers: list[tuple[list[int], str]], text: Text = TEXT) -> tuple[Conversation, list[list[int]]]:
    asked: list[list[int]] = []

    def ask(ids: list[int], _: GenerationConfig) -> Scripted:
        asked.append(ids)
        return Scripted(*answers[len(asked) - 1])

    return Conversation(text, ask, 10_000, "be the man"), asked


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([*THE, tiny.IM_END], "eos"), (THE, "length"), (THE, "cancelled"), ([*THE, tiny.ENDOFTEXT], "eos")],
)
def test_prompts_begin_with_the_ids_that_were_said_though_the_text_has_others(
    ids: list[int], reason: str
) -> None:
    talk, asked = scripted([(ids, reason)] * 3)
    for question in ("one", "two", "three"):
        talk.send(question)
    for turns, (before, after) in enumerate(pairwise(asked), 1):
        assert after[: len(before) + 3] == [*before, *THE]
        written = TEXT.render(talk._messages(talk._turns[:turns], ("one", "two", "three")[turns]))
        assert TEXT.spelled(after) == written, "the end is there once, as the template has it"
        assert after != TEXT.encode_part(written)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [(THE, "stop"), ([tiny.IM_START, *THE], "length"), ([*THE, tiny.IM_START, *THE], "length")],
    ids=["stop", "special", "inside"],
)
def test_ids_that_say_more_than_the_text_are_not_used(ids: list[int], reason: str) -> None:
    talk, asked = scripted([(ids, reason)] * 2)
    talk.send("one")
    talk.send("two")
    assert asked[1] == TEXT.encode_part(TEXT.render(talk._messages(talk._turns, "two")))


def test_a_template_that_changes_the_answer_is_obeyed() -> None:
    trimming = tiny.CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
    text = tiny.text(TEXT.tokenizer, trimming, None, "<|im_end|>")
    talk, asked = scripted([([*text.encode_part("  a"), tiny.IM_END], "eos")] * 2, text)
    talk.send("one")
    talk.send("two")
    assert asked[1] == text.encode_part(text.render(talk._messages(talk._turns, "two")))
    assert "assistant\na<" in text.spelled(asked[1])


def test_undo_and_edit(opened: Open) -> None:
    talk = opened().conversation("the man")
    for question in ("one", "two", "three"):
        said(talk, question)
    talk.undo()
    assert [turn.question for turn in talk.turns] == ["one", "two"]
    for _ in (reply := talk.edit("new", CONFIG)):
        pass
    assert [turn.question for turn in talk.turns] == ["one", "new"]
    assert reply.stats.cached_tokens > 20, "what stayed is not read again"
    for _ in talk.edit("first", CONFIG, turn=0):
        pass
    assert [turn.question for turn in talk.turns] == ["first"]
    assert talk.messages[0] == {"role": "system", "content": "the man"}
    talk.undo(5)
    assert talk.turns == ()
    for index in (0, -1, 3):
        with pytest.raises(SessionError, match="there is no turn"):
            talk.edit("x", turn=index)
    with pytest.raises(SessionError, match="turns must be 1 or more"):
        talk.undo(0)
    said(talk, "again")
    talk.reset()
    assert [m["role"] for m in talk.messages] == ["system"]


def test_messages_are_resumed_with_the_ids_that_were_said() -> None:
    talk, asked = scripted([(THE, "length")] * 5)
    for question in ("one", "two"):
        talk.send(question)
    messages = talk.messages
    talk.resume(messages)
    talk.send("three")
    assert asked[2][: len(asked[1]) + len(THE)] == [*asked[1], *THE], "the same turns keep their ids"
    talk.resume([*messages[:3], {"role": "user", "content": "new"}, {"role": "assistant", "content": "ha"}])
    now = talk.messages
    assert [turn.question for turn in talk.turns] == ["one", "new"]
    talk.send("four")
    assert asked[3] == TEXT.encode([*now, {"role": "user", "content": "four"}])
    talk.resume([{"role": "system", "content": "be kind"}, *messages[1:]])
    assert (talk.system, len(talk.turns)) == ("be kind", 2)
    for wrong in (messages[:2], messages[2:], [*messages, {"role": "system", "content": "late"}]):
        with pytest.raises(SessionError, match="in pairs"):
            talk.resume(wrong)
    assert len(talk.turns) == 2


def test_an_answer_that_is_left_counts_as_far_as_it_came(opened: Open) -> None:
    talk = opened().conversation()
    reply = talk.send("go on", CONFIG.with_values(tau=1.0))
    events = iter(reply)
    while not next(events).token_ids:
        pass
    next(events)
    assert talk.turns == (), "it is still being made"
    second = said(talk, "and?")
    assert reply.completion.finish_reason == "cancelled"
    assert [turn.question for turn in talk.turns] == ["go on", "and?"]
    assert talk.turns[0].answer == reply.completion.text
    assert second.stats.cached_tokens >= reply.stats.prompt_tokens
    talk.send("never read", CONFIG)
    assert len(talk.turns) == 2
    said(talk, "the end")
    assert [turn.question for turn in talk.turns] == ["go on", "and?", "the end"], (
        "nothing was said to the third"
    )


def test_a_turn_that_fails_never_was(opened: Open) -> None:
    session = opened()
    talk = session.conversation()
    said(talk, "one")
    before = talk.turns
    step = session.backend.step

    def broken(*_: Any) -> StepOutput:
        raise SessionError("the device is gone")

    session.backend.step = broken  # type: ignore[method-assign]
    with pytest.raises(SessionError, match="is gone"):
        said(talk, "two")
    session.backend.step = step  # type: ignore[method-assign]
    assert talk.turns == before
    with pytest.raises(SessionError, match="probability|--metrics"):
        talk.send("x", CONFIG.with_values(tau=0.5, metric="margin"))
    assert talk.turns == before
    assert said(talk, "two").token_ids


def test_the_end_of_the_context_is_said(opened: Open) -> None:
    talk = opened(context=128).conversation("be the man")
    with pytest.raises(SessionError, match=r"the conversation has \d+ tokens .* holds 128; remove turns"):
        [said(talk, f"question {i}") for i in range(30)]
    assert len(talk.turns) > 1, "what was said is still there"
    talk.undo(len(talk.turns))
    with pytest.raises(SessionError, match="shorten them"):
        talk.send("x " * 100)
    assert said(talk, "short").token_ids


def test_the_oldest_turns_go_where_that_is_allowed_and_it_is_said(opened: Open) -> None:
    session = opened(context=160)
    talk = session.conversation("be the man", drop_oldest=True)
    dropped = []
    for i in range(25):
        done = said(talk, f"q {i}")
        assert done.finish_reason != "capacity"
        assert done.stats.prompt_tokens + 10 <= 160
        assert talk.messages[0]["role"] == "system"
        assert talk.turns[-1].question == f"q {i}"
        dropped.append(talk.dropped)
    assert sum(dropped) == 25 - len(talk.turns)
    assert 1 < sum(n > 0 for n in dropped) < 15, "some at a time: what stays is not read again at each turn"
    with pytest.raises(SessionError, match="shorten them"):
        talk.send("x " * 200)


def test_only_with_text(opened: Open) -> None:
    session = opened()
    text, session.text = session.text, None
    with pytest.raises(SessionError, match="needs a tokenizer"):
        session.conversation()
    session.text = text
