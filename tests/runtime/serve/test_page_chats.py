"""Several chats, which the browser keeps: the list, a full storage, a blocked one."""

from __future__ import annotations

import json
from typing import Any

from support.missing import need
from support.page import FOREVER, LONG, WORDS, Open, ask, ended, write

need("uvicorn", "serve")

from support.fake_serve import FakeServe, tokens_of  # noqa: E402

BLOCKED = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });"""

FILL = """for (let text = "x".repeat(1 << 22); text.length > 64; ) {
  try { localStorage.setItem(`other.${localStorage.length}`, text); }
  catch { text = text.slice(text.length / 2); }
}"""


def titles(tab: Any) -> list[str]:
    tab.get_by_role("button", name="Chats", exact=True).click()
    return tab.locator("#chats-list .open").all_inner_texts()


def chat(tab: Any, title: str) -> None:
    """Choose one of the list, which is open."""
    tab.get_by_role("dialog", name="Chats").get_by_role("button", name=title, exact=True).click()


def test_chats_are_kept_switched_and_deleted(visit: Open) -> None:
    fake = FakeServe([tokens_of("the first"), tokens_of("the second"), tokens_of(LONG)])
    tab = visit(fake)
    assert titles(tab) == []
    tab.keyboard.press("Escape")
    ask(tab, "one?\nmore")
    tab.get_by_role("button", name="New chat").click()
    ask(tab, "two <b>")
    assert titles(tab) == ["two <b>", "one?"], "the newest first"
    chat(tab, "one?")
    assert tab.locator("article .text").all_inner_texts() == ["the first"]
    fake.pace = 0.05
    write(tab, "again")
    tab.locator("article").nth(1).locator(".t").nth(8).wait_for()
    fake.pace = FOREVER
    tab.locator("article .text").first.click()
    tab.keyboard.press("c")
    chat(tab, "two <b>")
    ended(tab)
    assert tab.locator("article .text").all_inner_texts() == ["the second"]
    other = tab.context.new_page()
    other.goto(tab.url)
    assert titles(other) == ["one?", "two <b>"], "all tabs have the list"
    chat(other, "one?")
    assert other.locator("article .text").last.inner_text().startswith("w0 w1")
    assert "stopped" in other.locator("article .state").last.inner_text()
    other.reload()
    assert other.locator(".user").all_inner_texts() == ["one?\nmore", "again"]
    titles(other)
    other.once("dialog", lambda question: question.dismiss())
    other.get_by_role("button", name="Delete chat: one?").click()
    other.once("dialog", lambda question: question.accept())
    other.get_by_role("button", name="Delete chat: one?").click()
    assert other.locator("#chats-list .open").all_inner_texts() == ["two <b>"]
    assert other.locator("article").count() == 0 and "one?" not in str(other.context.storage_state())


def test_chats_are_searched_and_renamed(visit: Open) -> None:
    tab = visit(FakeServe([tokens_of("Say Ahoy"), tokens_of("plain")]))
    ask(tab, "one")
    tab.get_by_role("button", name="New chat").click()
    ask(tab, "two")
    assert titles(tab) == ["two", "one"]
    find = tab.get_by_role("searchbox", name="Search chats")
    find.fill("ahoy")
    assert tab.locator("#chats-list .open").all_inner_texts() == ["one"], "an answer has it"
    tab.once("dialog", lambda question: question.accept("Ships <b>"))
    tab.get_by_role("button", name="Rename chat: one").click()
    assert tab.locator("#chats-list .open").all_inner_texts() == ["Ships <b>"]
    find.fill("SHIPS")
    tab.keyboard.press("Enter")
    assert tab.locator("article .text").all_inner_texts() == ["Say Ahoy"]
    ask(tab, "again")
    tab.reload()
    assert titles(tab) == ["Ships <b>", "two"]
    tab.once("dialog", lambda question: question.accept(" "))
    tab.get_by_role("button", name="Rename chat: Ships <b>").click()
    assert tab.locator("#chats-list .open").all_inner_texts() == ["one", "two"]
    find.fill("nothing")
    assert "No chat has this text" in tab.locator("#chats-note").inner_text()


def test_a_full_storage_keeps_texts_and_then_the_newest(visit: Open) -> None:
    """What 5 MB do not hold: steps of older chats go first, then the oldest chats."""
    tab = visit(FakeServe([tokens_of(WORDS)]))
    for name in ("one", "two"):
        tab.get_by_role("button", name="New chat").click()
        ask(tab, name)
    tab.evaluate(FILL)
    tab.get_by_role("button", name="New chat").click()
    ask(tab, "three")
    assert titles(tab)[:2] == ["three", "two"]
    tab.reload()
    assert tab.locator("article .text").all_inner_texts() == [WORDS]
    assert titles(tab)[0] == "three"
    chat(tab, "two")
    assert tab.locator("article .text").all_inner_texts() == [WORDS]
    assert "60 tokens" in tab.locator("article .foot").inner_text()


def test_no_more_than_fifty_chats(visit: Open) -> None:
    tab = visit(FakeServe([tokens_of("fine")]))
    turn = {"user": "old", "system": "", "answers": []}
    for i in range(50):
        kept = json.dumps({"id": f"c{i}", "talk": [turn]})
        tab.evaluate("([k, v]) => localStorage.setItem(k, v)", [f"mars.chat.c{i}", kept])
    listed = json.dumps([{"id": f"c{i}", "title": f"old {i}", "at": 0} for i in range(50)])
    tab.evaluate("(v) => localStorage.setItem('mars.chats', v)", listed)
    ask(tab, "new")
    assert titles(tab) == ["new", *(f"old {i}" for i in range(49))]
    assert tab.evaluate("localStorage.getItem('mars.chat.c49')") is None


def test_a_blocked_storage(visit: Open) -> None:
    fake = FakeServe([tokens_of("the first"), tokens_of("the second")])
    tab = visit(fake)
    tab.add_init_script(BLOCKED)
    tab.reload()
    ask(tab, "one")
    tab.get_by_role("button", name="New chat").click()
    ask(tab, "two")
    assert titles(tab) == ["two", "one"]
    chat(tab, "one")
    assert tab.locator("article .text").all_inner_texts() == ["the first"]
