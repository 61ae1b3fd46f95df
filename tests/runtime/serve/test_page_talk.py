"""A talk on the page: questions, answers, a stop, a reload, two answers beside each other."""

from __future__ import annotations

import re

from support.missing import need
from support.page import FOREVER, LONG, WORDS, Open, ended, runs, slide, write

need("uvicorn", "serve")

from support.fake_serve import FakeServe, tokens_of  # noqa: E402


def test_a_question_and_its_answer(visit: Open) -> None:
    fake = FakeServe([tokens_of(WORDS)])
    tab = visit(fake)
    tab.get_by_role("status", name="Server").get_by_text("ready").wait_for()
    write(tab, "how are <you>?")
    ended(tab)
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
    write(tab, "and you?")
    ended(tab)
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
    write(tab, "again")
    ended(tab)
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
    write(tab, "one")
    ended(tab)
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
    write(tab, "go")
    ended(tab)
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
