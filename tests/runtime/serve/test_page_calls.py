"""Tool calls on the page, those of a text and those of the interface; and thinking."""

from __future__ import annotations

import json
import re

from support.missing import need
from support.page import Open, ended, write

need("uvicorn", "serve")

from support.fake_serve import FakeServe, tokens_of  # noqa: E402

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
    write(tab, "ring")
    ended(tab)
    assert fake.requests[0]["tools"] == [tool]
    assert tab.locator("figure.call dl").first.inner_text().split() == ["times", "[", "1,", "null", "]"]
    assert "no JSON" in tab.locator("figure.call").nth(1).inner_text()
    write(tab, "more")
    ended(tab)
    assert json.loads(fake.requests[1]["messages"][1]["content"])[0]["arguments"] == {"times": [1, None]}


def test_thinking_is_folded(visit: Open) -> None:
    fake = FakeServe([tokens_of("<think> I wonder. </think> Hello there")], thinking=4)
    tab = visit(fake)
    write(tab, "hi")
    ended(tab)
    fold, text = tab.locator("details.thinking"), tab.locator("article .text")
    assert fold.locator(".thought").is_hidden() and text.inner_text().strip() == "Hello there"
    fold.locator("summary").click()
    assert "I wonder." in fold.locator(".thought").inner_text()
    write(tab, "more")
    ended(tab)
    assert fake.requests[1]["messages"][1] == {"role": "assistant", "content": " Hello there"}
