"""The page for all eyes and hands: keyboard, names of controls, themes, small screens; and its policy, by
which what a model says can do nothing to it.
"""

from __future__ import annotations

import re

import pytest
from support.missing import need
from support.page import WORDS, Open, ask, ended

from mars_export.runtime.serve.page import page, page_headers

need("uvicorn", "serve")

from support.fake_serve import FakeServe, tokens_of  # noqa: E402


def test_by_keyboard_alone(visit: Open) -> None:
    fake = FakeServe([tokens_of(WORDS)], forced=True)
    tab = visit(fake)
    keys = tab.keyboard
    keys.press("/")
    keys.type("first")
    keys.press("Shift+Enter")
    keys.type("second")
    keys.press("Enter")
    ended(tab)
    assert fake.requests[0]["messages"][0]["content"] == "first\nsecond"
    tab.locator("article .t").first.focus()
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    tip = tab.get_by_role("tooltip").inner_text()
    assert "␣w2" in tip and "97.0 %" in tip and "step 2, 2 of 6" in tip and "forced" in tip
    assert tab.locator("article .t:focus").get_attribute("aria-describedby") == "tip"
    keys.press("End")
    assert "verified" not in tab.get_by_role("tooltip").inner_text()
    keys.press("e")
    assert tab.get_by_role("radio", name="Tau").get_attribute("aria-checked") == "true"
    keys.press("[")
    assert tab.get_by_role("slider", name="Tau").input_value() == "0.9"


def test_every_control_has_a_name(visit: Open) -> None:
    tab = visit(FakeServe([tokens_of(WORDS)]))
    ask(tab, "go")
    page = tab.locator("body").aria_snapshot()
    tab.get_by_role("button", name="Settings").click()
    shown = page + tab.get_by_role("dialog").aria_snapshot()
    controls = re.findall(
        r"- (button|combobox|textbox|slider|radio|spinbutton|dialog|group|log)\b(.*)", shown
    )
    assert len(controls) > 15
    assert [c for c in controls if not c[1].strip().startswith('"')] == []


def test_the_system_message_is_in_sight_and_the_page_says_what_it_is(visit: Open) -> None:
    tab = visit(FakeServe([tokens_of(WORDS)]))
    assert "A chat with a language model on this server" in tab.locator("#empty").inner_text()
    for name in ("Colours", "New chat", "Settings"):
        assert tab.locator("header").get_by_text(name, exact=True).is_visible()
    tab.get_by_role("button", name="No system message").click()
    tab.get_by_label("System message", exact=True).fill("be kind")
    tab.get_by_role("button", name="Done").click()
    ask(tab, "go")
    assert tab.get_by_role("button", name="System: be kind").is_visible()
    assert tab.locator(".system").inner_text() == "system: be kind"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours(visit: Open, scheme: str) -> None:
    tab = visit(FakeServe([tokens_of(WORDS)]), color_scheme=scheme)
    other = {"light": "dark", "dark": "light"}[scheme]
    theme = tab.locator("html")
    assert theme.get_attribute("data-theme") == scheme
    tab.get_by_role("button", name="Colours: as the system").click()
    assert theme.get_attribute("data-theme") == other
    tab.reload()
    assert theme.get_attribute("data-theme") == other
    tab.get_by_role("button", name=f"Colours: {other}").click()
    tab.get_by_role("button", name=f"Colours: {scheme}").click()
    tab.emulate_media(color_scheme=other)
    tab.locator(f"html[data-theme={other}]").wait_for()


def test_on_a_phone(visit: Open) -> None:
    size = {"width": 360, "height": 640}
    tab = visit(FakeServe([[("x" * 400, 0.9), *tokens_of(WORDS)]]), viewport=size, is_mobile=True)
    assert tab.evaluate("document.querySelector('#scroll').scrollTop") == 0  # the page begins with its title
    ask(tab, "y" * 300)
    for name in ("header", ".dock", ".user", "article", "#say", "#go", "#tau", "aside"):
        box = tab.locator(name).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"], name
    assert tab.locator("#go").bounding_box()["y"] < size["height"]
    tab.get_by_role("button", name="Chats", exact=True).click()
    box = tab.get_by_role("button", name="Delete chat").bounding_box()
    assert box["x"] + box["width"] <= size["width"], "a long title leaves room for it"
    tab.get_by_role("button", name="Delete chat").click(trial=True)


HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    " </div>\u202e<a href='javascript:alert(1)'>&lt;b&gt; \u0007"
)


def test_what_a_model_says_is_text(visit: Open) -> None:
    fake = FakeServe(
        [[(HOSTILE, 0.9)], [(f'[{{"name": "{"<b>x</b>"}", "arguments": {{"<i>": "<u>"}}}}]', 0.9)]]
    )
    tab = visit(fake)
    ask(tab, "<b>me</b>")
    assert tab.locator("article .t").inner_text() == HOSTILE
    tab.locator("article .t").hover()
    assert "U+202E" in tab.get_by_role("tooltip").inner_text()
    ask(tab, "more")
    assert tab.locator(".call").inner_text().split() == ["<b>x</b>", "tool", "call", "<i>", '"<u>"']
    assert tab.locator("#talk :is(img, script, a, b:not(.foot b), i:not(.track i), u)").count() == 0
    tab.reload()
    assert tab.locator("article .t").first.inner_text() == HOSTILE
    assert tab.title() == "mars-export"


def test_one_file_and_its_policy() -> None:
    """What the header promises the file holds: no markup from text, no handlers, nothing from elsewhere."""
    source = page().decode()
    code = source.partition("<script>")[2]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in source
    assert "http://" not in code and "https://" not in code
    assert re.search(r"<[^>]*\s(on\w+|style|src)=", source.partition("<script>")[0]) is None
    policy = page_headers()["Content-Security-Policy"]
    kinds = dict(part.split(" ", 1) for part in policy.split("; "))
    assert kinds["default-src"] == kinds["base-uri"] == kinds["frame-ancestors"] == "'none'"
    assert kinds["script-src"].startswith("'sha256-") and "unsafe" not in policy
