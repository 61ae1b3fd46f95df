"""A talk on the page: questions, answers, a stop, a reload, two answers beside each other; what a person sets
in mid-answer, models and profiles; tool calls and thinking.
"""

from __future__ import annotations

import json
import re

from support.missing import need
from support.page import FOREVER, LONG, WORDS, Open, ask, ended, runs, slide, write

need("uvicorn", "serve")

from support.fake_serve import FakeServe, tokens_of  # noqa: E402


def test_a_question_and_its_answer(visit: Open) -> None:
    fake = FakeServe([tokens_of(WORDS)])
    tab = visit(fake)
    tab.get_by_role("status", name="Server").get_by_text("ready").wait_for()
    ask(tab, "how are <you>?")
    answer = tab.get_by_role("article")
    assert answer.locator(".text").inner_text() == WORDS
    assert tab.locator(".user").inner_text() == "how are <you>?"
    (request,) = fake.requests
    assert request["messages"] == [{"role": "user", "content": "how are <you>?"}]
    assert request["stream"] is request["return_steps"] is request["exact"] is True
    assert (request["model"], "tau" in request) == ("tiny", False)
    assert re.search(r"60 tokens\s.*tokens/s\s*5\.45 tokens/forward", answer.inner_text(), re.DOTALL)
    assert "32 of 40 prompt tokens from cache" in answer.inner_text()
    figures = tab.get_by_role("complementary", name="Figures of the answer")
    assert "5.45" in figures.inner_text()
    assert runs(tab) == [1, *[6] * 9, 5]
    kinds = {"next": 11, "verified": 49}
    assert {k: answer.locator(f".t.{k}").count() for k in kinds} == kinds
    ask(tab, "and you?")
    said = [message["role"] for message in fake.requests[1]["messages"]]
    assert said == ["user", "assistant", "user"]
    assert fake.requests[1]["messages"][1]["content"] == WORDS


def test_stop(visit: Open) -> None:
    fake = FakeServe([tokens_of(WORDS), tokens_of("all is well"), tokens_of(LONG)], pace=0.1)
    tab = visit(fake)
    slide(tab, 1)
    write(tab, "go")
    tab.locator("article .t").nth(2).wait_for()
    fake.pace = FOREVER
    tab.get_by_role("button", name="Stop").click()
    ended(tab)
    fake.pace = 0
    assert "stopped" in tab.locator("article .state").inner_text()
    said = tab.locator("article .text").inner_text()
    assert said.startswith("w0 w1") and len(said) < len(WORDS)
    ask(tab, "again")
    assert fake.ended == ["left", "whole"], "the server saw the first one go"
    assert fake.requests[1]["messages"][1]["content"] == said
    fake.pace = 0.1
    write(tab, "more")
    tab.locator("article").nth(2).locator(".t").first.wait_for()
    fake.pace = FOREVER
    tab.keyboard.press("Escape")
    ended(tab)
    assert "stopped" in tab.locator("article .state").last.inner_text()


def test_reload_keeps_the_talk(visit: Open) -> None:
    fake = FakeServe([tokens_of("the first answer"), tokens_of(WORDS)])
    tab = visit(fake)
    ask(tab, "one")
    fake.pace = 0.2
    write(tab, "two")
    tab.locator("article").nth(1).locator(".t").nth(2).wait_for()
    fake.pace = FOREVER
    tab.reload()
    assert tab.locator(".user").all_inner_texts() == ["one", "two"]
    texts = tab.locator("article .text").all_inner_texts()
    assert texts[0] == "the first answer" and texts[1].startswith("w0")
    assert "interrupted" in tab.locator("article .state").nth(1).inner_text()
    assert tab.locator("article").nth(0).locator(".t.verified").count(), "shades, too"
    tab.get_by_role("button", name="New chat").click()
    tab.reload()
    assert tab.locator("article").count() == 0
    other = tab.context.new_page()
    other.goto(tab.url)
    assert other.locator("article").count() == 0, "a talk belongs to its tab"


def test_beside_one_token(visit: Open) -> None:
    fake = FakeServe([tokens_of(WORDS)], pace=0.005)
    tab = visit(fake)
    tab.get_by_role("button", name="Compare with one token").click()
    ask(tab, "go")
    asked = [(r.get("exact"), r.get("tau"), r.get("cache_salt")) for r in fake.requests]
    assert asked == [(True, None, None), (None, 1, "one token")], "the second reads its prompt anew"
    assert tab.locator("article .mode").all_inner_texts() == ["exact", "one token"]
    comparison = tab.get_by_role("group", name="Comparison").inner_text()
    assert comparison.count("tokens/s") == 2 and "the same text" in comparison and "5.45×" in comparison
    tab.get_by_role("button", name="Replay together").click()
    tab.locator("article.live").first.wait_for()
    tab.locator("article.live").first.wait_for(state="detached")
    assert tab.locator("article .text").all_inner_texts() == [WORDS, WORDS]
    assert len(fake.requests) == 2, "a replay is of what was measured"


def test_tau_in_mid_answer(visit: Open) -> None:
    """The control request is seen, and later steps take what the new tau lets through."""
    fake = FakeServe([tokens_of(LONG)], pace=0.05)
    tab = visit(fake)
    slide(tab, 1)
    write(tab, "go")
    tab.locator("article .t").nth(3).wait_for()
    slide(tab, 0.5)
    tab.locator(".mark").get_by_text("tau 0.50").wait_for()
    slide(tab, 0.9)
    tab.locator(".mark").get_by_text("tau 0.90").wait_for()
    fake.pace = 0
    ended(tab)
    assert (fake.requests[0]["tau"], "exact" in fake.requests[0]) == (1, False)
    assert fake.controls == [{"tau": 0.5}, {"tau": 0.9}]
    made = runs(tab)
    assert made[:3] == [1, 1, 1]
    assert max(made) == 8
    assert made[-1] <= 5, "at 0.9 every fifth word ends a run"
    assert "tau 0.90" in tab.locator("article .mode").inner_text()
    assert tab.locator("article .text").inner_text().replace("tau 0.50", "").replace("tau 0.90", "") == LONG


def test_the_key_is_asked_for_and_kept_for_the_tab(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")], key="secret")
    tab = visit(fake)
    assert "wants an API key" in tab.get_by_role("dialog", name="Settings").inner_text()
    tab.get_by_label("API key").fill("secret")
    tab.get_by_role("button", name="Done").click()
    tab.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    ask(tab, "go")
    assert tab.locator("article .text").inner_text() == "fine"
    kept = tab.context.storage_state()
    assert "secret" not in str(kept), "nothing that outlives the tab"


def test_models_and_profiles(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")])
    tab = visit(fake)
    models = tab.get_by_role("combobox", name="Model")
    models.locator("option").nth(1).wait_for(state="attached")
    assert models.locator("option").all_inner_texts() == ["tiny", "other (not loaded)"], (
        "profiles have a chooser of their own"
    )
    tab.get_by_role("combobox", name="Profile").select_option("assistant")
    ask(tab, "go")
    assert fake.requests[0]["profile"] == "assistant"
    assert not {"tau", "exact"} & fake.requests[0].keys()
    models.select_option("other")
    assert tab.get_by_role("combobox", name="Profile").count() == 0
    ask(tab, "go")
    assert fake.requests[1]["model"] == "other" and fake.requests[1]["exact"] is True
    models.get_by_text("other", exact=True).wait_for(state="attached")
    assert models.locator("option").all_inner_texts() == ["tiny", "other"], "it was loaded for its request"


CALLS = (
    '[{"name": "set_light", "arguments": {"room": "kitchen", "on": true}}, {"name": "ring", "arguments": {}}]'
)


def test_tool_calls_are_printed(visit: Open) -> None:
    fake = FakeServe([[(part, 0.99) for part in re.findall(r"\W?\w+|\W", CALLS)]])
    tab = visit(fake)
    tab.get_by_role("button", name="turn on the kitchen light").click()
    ended(tab)
    assert [m["role"] for m in fake.requests[0]["messages"]] == ["system", "user"]
    calls = tab.locator("figure.call")
    assert calls.locator("figcaption").all_inner_texts() == ["set_light\ntool call", "ring\ntool call"]
    assert calls.first.locator("dl").inner_text().split() == ["room", '"kitchen"', "on", "true"]


def test_calls_of_the_interface(visit: Open) -> None:
    fake = FakeServe([[]], calls=[("ring", '{"times": [1, null]}'), ("odd", "no JSON")])
    tab = visit(fake)
    tab.get_by_role("button", name="Settings").click()
    tool = {"type": "function", "function": {"name": "ring", "parameters": {}}}
    tab.get_by_label("Tools").fill("what?")
    tab.get_by_role("button", name="Done").click()
    write(tab, "ring")
    assert "no JSON list" in tab.get_by_role("alert").inner_text()
    tab.get_by_label("Tools").fill(json.dumps([tool]))
    tab.get_by_role("button", name="Done").click()
    ask(tab, "ring")
    assert fake.requests[0]["tools"] == [tool]
    assert tab.locator("figure.call dl").first.inner_text().split() == ["times", "[", "1,", "null", "]"]
    assert "no JSON" in tab.locator("figure.call").nth(1).inner_text()
    ask(tab, "more")
    assert json.loads(fake.requests[1]["messages"][1]["content"])[0]["arguments"] == {"times": [1, None]}


def test_thinking_is_folded(visit: Open) -> None:
    fake = FakeServe([tokens_of("<think> I wonder. </think> Hello there")], thinking=4)
    tab = visit(fake)
    ask(tab, "hi")
    fold, text = tab.locator("details.thinking"), tab.locator("article .text")
    assert fold.locator(".thought").is_hidden() and text.inner_text().strip() == "Hello there"
    fold.locator("summary").click()
    assert "I wonder." in fold.locator(".thought").inner_text()
    ask(tab, "more")
    assert fake.requests[1]["messages"][1] == {"role": "assistant", "content": " Hello there"}
