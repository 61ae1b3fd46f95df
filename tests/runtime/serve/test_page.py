"""The page in a real Chromium, against a server with a script for a model (support/fake_serve.py)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.agreement import MAIN
from support.browser import browser
from support.fake import Recording
from support.fixtures import Sessions
from support.missing import need

from mars_export.runtime import Session
from mars_export.runtime.decode.backend import StepOutput
from mars_export.runtime.serve.page import page as page_bytes
from mars_export.runtime.serve.page import policy

need("uvicorn", "serve")

from starlette.applications import Starlette  # noqa: E402
from starlette.routing import Mount  # noqa: E402
from support.fake_serve import FakeServe, Running, tokens_of  # noqa: E402
from support.served import serving, until  # noqa: E402

WORDS = " ".join(f"w{i}" for i in range(60))
LONG = " ".join(f"w{i}" for i in range(900))  # with FOREVER: an answer that cannot end before a test wants it
FOREVER = 60.0
CALLS = (
    '[{"name": "set_light", "arguments": {"room": "kitchen", "on": true}}, {"name": "ring", "arguments": {}}]'
)
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    " </div>\u202e<a href='javascript:alert(1)'>&lt;b&gt; \u0007"
)
HOW = ("next", "accepted", "verified", "forced")
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as instance:
        yield instance


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Opens the page of a fake. Whatever a test does, the console is silent and nothing leaves the house."""
    with ExitStack() as stack:
        said: list[str] = []
        asked: list[tuple[str, str]] = []

        def opened(fake: FakeServe | str, **settings: Any) -> Any:
            """A tab with the page of a fake, or of the server at an address."""
            address = fake if isinstance(fake, str) else stack.enter_context(Running(fake.app()))
            context = stack.enter_context(chromium.new_context(**settings))
            tab = context.new_page()
            tab.set_default_timeout(20_000)
            tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
            tab.on("pageerror", lambda error: said.append(f"error: {error}"))
            tab.on("request", lambda request: asked.append((address, request.url)))
            tab.goto(address)
            return tab

        yield opened
    # A refused request (401, 404) is a line that Chromium writes itself.
    assert [line for line in said if "Failed to load resource" not in line] == []
    assert asked
    assert [url for home, url in asked if not url.startswith((home, "data:"))] == []


def write(tab: Any, text: str) -> None:
    tab.get_by_role("textbox", name="Message", exact=True).fill(text)
    tab.keyboard.press("Enter")


def ended(tab: Any) -> None:
    tab.get_by_role("button", name="Send").wait_for()


def slide(tab: Any, tau: float) -> None:
    tab.get_by_role("slider", name="Tau").fill(str(tau))


def runs(tab: Any) -> list[int]:
    """Tokens of each step of the last answer, as drawn."""
    last = (
        tab.content().partition('<form class="dock"')[0].rpartition("<article")[2]
    )  # one look, however long it is
    kinds = [names.split() for names in re.findall(r'class="t ([^"]*)"', last)]
    starts = [i for i, names in enumerate(kinds) if "first" in names]
    return [b - a for a, b in zip(starts, [*starts[1:], len(kinds)], strict=True)]


def port(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


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


def test_exact_on_and_off_in_mid_answer(visit: Open) -> None:
    fake = FakeServe([tokens_of(LONG)], pace=0.05)
    tab = visit(fake)
    slide(tab, 1)
    write(tab, "go")
    tab.locator("article .t").nth(2).wait_for()
    tab.get_by_role("radio", name="Exact").click()
    tab.locator("article .t.verified").first.wait_for()
    tab.get_by_role("radio", name="Tau").click()
    tab.locator(".mark").nth(1).wait_for()
    fake.pace = 0
    ended(tab)
    assert fake.controls == [{"exact": True}, {"tau": 1}]
    assert tab.get_by_role("radio", name="Tau").get_attribute("aria-checked") == "true"


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
    tab.get_by_role("button", name="New talk").click()
    tab.reload()
    assert tab.locator("article").count() == 0
    other = tab.context.new_page()
    other.goto(tab.url)
    assert other.locator("article").count() == 0, "a talk belongs to its tab"


def test_what_a_model_says_is_text(visit: Open) -> None:
    fake = FakeServe(
        [[(HOSTILE, 0.9)], [(f'[{{"name": "{"<b>x</b>"}", "arguments": {{"<i>": "<u>"}}}}]', 0.9)]]
    )
    tab = visit(fake)
    write(tab, "<b>me</b>")
    ended(tab)
    assert tab.locator("article .t").inner_text() == HOSTILE
    tab.locator("article .t").hover()
    assert "U+202E" in tab.get_by_role("tooltip").inner_text()
    write(tab, "more")
    ended(tab)
    assert tab.locator(".call").inner_text().split() == ["<b>x</b>", "tool", "call", "<i>", '"<u>"']
    assert tab.locator("#talk :is(img, script, a, b:not(.foot b), i:not(.track i), u)").count() == 0
    tab.reload()
    assert tab.locator("article .t").first.inner_text() == HOSTILE
    assert tab.title() == "mars-export"


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


def test_beside_one_token(visit: Open) -> None:
    fake = FakeServe([tokens_of(WORDS)], pace=0.005)
    tab = visit(fake)
    tab.get_by_role("button", name="Beside one token").click()
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


def test_the_key_is_asked_for_and_kept_for_the_tab(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")], key="secret")
    tab = visit(fake)
    assert "wants an API key" in tab.get_by_role("dialog", name="Settings").inner_text()
    tab.get_by_label("API key").fill("secret")
    tab.get_by_role("button", name="Done").click()
    tab.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    write(tab, "go")
    ended(tab)
    assert tab.locator("article .text").inner_text() == "fine"
    kept = tab.context.storage_state()
    assert "secret" not in str(kept), "nothing that outlives the tab"


def test_models_and_profiles(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")])
    tab = visit(fake)
    models = tab.get_by_role("combobox", name="Model")
    models.locator("option").nth(1).wait_for(state="attached")
    assert models.locator("option").all_inner_texts() == ["tiny", "other"], (
        "profiles have a chooser of their own"
    )
    tab.get_by_role("combobox", name="Profile").select_option("assistant")
    write(tab, "go")
    ended(tab)
    assert fake.requests[0]["profile"] == "assistant"
    assert not {"tau", "exact"} & fake.requests[0].keys()
    tab.get_by_role("combobox", name="Profile").select_option("by load")
    write(tab, "go")
    ended(tab)
    assert not {"tau", "exact", "profile"} & fake.requests.pop().keys(), "the server chooses"
    models.select_option("other")
    assert tab.get_by_role("combobox", name="Profile").count() == 0
    write(tab, "go")
    ended(tab)
    assert fake.requests[1]["model"] == "other" and fake.requests[1]["exact"] is True


def test_a_refusal_is_shown(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")], refusal="the queue is full; come back")
    tab = visit(fake)
    write(tab, "go")
    ended(tab)
    assert "the queue is full; come back" in tab.locator("article").inner_text()
    fake.refusal = ""
    write(tab, "again")
    ended(tab)
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "again"}], "what was never answered"


def test_a_server_that_goes(visit: Open) -> None:
    """What it had said stays, and the page says what happened; it finds a server that is there again."""
    fake = FakeServe([tokens_of(WORDS)], pace=0.1)
    with Running(fake.app()) as address:
        tab = visit(address)
        write(tab, "go")
        tab.locator("article .t").nth(2).wait_for()
        fake.pace = FOREVER
    ended(tab)
    said = tab.locator("article .text").inner_text()
    assert said.startswith("w0") and len(said) < len(WORDS)
    words = tab.locator("article .note.bad").inner_text()
    assert "broke off" in words or "cannot be reached" in words
    write(tab, "again")
    ended(tab)
    assert "cannot be reached" in tab.locator("article .note.bad").last.inner_text()
    tab.get_by_role("status", name="Server").get_by_text("no server").wait_for()
    with Running(fake.app(), port(address)):
        tab.get_by_role("status", name="Server").get_by_text("ready").wait_for()


def test_below_a_prefix(visit: Open) -> None:
    """Mounted in another application, under a path of its own."""
    fake = FakeServe([tokens_of("fine")])
    with Running(Starlette(routes=[Mount("/models/mars", fake.app())])) as address:
        tab = visit(f"{address}models/mars/")
        write(tab, "go")
        ended(tab)
        assert tab.locator("article .text").inner_text() == "fine"


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


def test_ways_to_stand_differ_without_colour(visit: Open) -> None:
    """Verified has a line, forced a dotted one, the others none: told apart in grey, too."""
    tab = visit(FakeServe([tokens_of(WORDS)], forced=True), bypass_csp=True)  # to ask for computed styles
    write(tab, "go")
    ended(tab)
    lines = "(e) => { const s = getComputedStyle(e); return [s.boxShadow != 'none', s.borderBottomStyle]; }"
    legend = tab.locator("#legend")
    looks = {how: legend.locator(f".t.{how}").evaluate(lines) for how in HOW}
    assert looks == {
        "next": [False, "none"],
        "accepted": [False, "none"],
        "verified": [True, "none"],
        "forced": [False, "dotted"],
    }
    counts = [int(words) for words in legend.locator("li > :last-child").all_inner_texts()]
    assert sum(counts) == 60 and counts[1] == 0 and counts[2] > counts[3] > 0


def test_every_control_has_a_name(visit: Open) -> None:
    tab = visit(FakeServe([tokens_of(WORDS)]))
    write(tab, "go")
    ended(tab)
    page = tab.locator("body").aria_snapshot()
    tab.get_by_role("button", name="Settings").click()
    shown = page + tab.get_by_role("dialog").aria_snapshot()
    controls = re.findall(
        r"- (button|combobox|textbox|slider|radio|spinbutton|dialog|group|log)\b(.*)", shown
    )
    assert len(controls) > 15
    assert [c for c in controls if not c[1].strip().startswith('"')] == []


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
    write(tab, "y" * 300)
    ended(tab)
    for name in ("header", ".dock", ".user", "article", "#say", "#go", "#tau", "aside"):
        box = tab.locator(name).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"], name
    assert tab.locator("#go").bounding_box()["y"] < size["height"]


def test_less_motion(visit: Open) -> None:
    tab = visit(FakeServe([tokens_of(WORDS)]), reduced_motion="reduce")
    tab.get_by_role("button", name="Beside one token").click()
    write(tab, "go")
    ended(tab)
    tab.get_by_role("group", name="Comparison").wait_for()
    assert tab.get_by_role("button", name="Replay together").count() == 0


class Slow(Recording):
    """Another backend with steps that can be watched."""

    pace = 0.2

    def step(self, *arguments: Any) -> StepOutput:
        time.sleep(self.pace)
        return self.backend.step(*arguments)


def test_the_server_itself(visit: Open, sessions: Sessions) -> None:
    """Not a fake: tau 1, then 0 in mid-answer, of a model whose every guess that lets through."""
    quick = sessions(MAIN)
    backend = Slow(quick.backend)
    session = Session(quick.bundle, quick.variant, backend)
    with serving({"tiny": session}) as server:
        tab = visit(f"{server.url}/")
        tab.get_by_role("button", name="Settings").click()
        tab.get_by_label("Most tokens").fill("90")
        tab.get_by_label("Window").select_option("full")
        tab.get_by_role("button", name="Done").click()
        slide(tab, 1)
        write(tab, "hi there")
        tab.locator("article .t").nth(5).wait_for(state="attached")
        slide(tab, 0)
        tab.locator(".mark").get_by_text("tau 0.00").wait_for()
        backend.pace = 0.03
        ended(tab)
        made = runs(tab)
        assert made[:5] == [1] * 5 and max(made) > 1
        assert "tau 0.00" in tab.locator("article .mode").inner_text()
        assert f"{sum(made)} tokens" in tab.locator("article .foot").inner_text()
        backend.pace = 0.2
        slide(tab, 1)
        write(tab, "again")
        tab.locator("article").nth(1).locator(".t").first.wait_for(state="attached")
        tab.get_by_role("button", name="Stop").click()
        until(lambda: server.batcher.num_running == 0)
        backend.pace = 0.0
        tab.get_by_role("radio", name="Exact").click()
        write(tab, "exactly")
        ended(tab)
        assert tab.locator("article .mode").last.inner_text() == "exact"
        assert tab.locator("article .note.bad").all_inner_texts() == [""] * 3


def test_one_file_and_its_policy() -> None:
    """What the header promises the file holds: no markup from text, no handlers, nothing from elsewhere."""
    source = page_bytes().decode()
    code = source.partition("<script>")[2]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in source
    assert "http://" not in code and "https://" not in code
    assert re.search(r"<[^>]*\s(on\w+|style|src)=", source.partition("<script>")[0]) is None
    kinds = dict(part.split(" ", 1) for part in policy().split("; "))
    assert kinds["default-src"] == kinds["base-uri"] == kinds["frame-ancestors"] == "'none'"
    assert kinds["script-src"].startswith("'sha256-") and "unsafe" not in policy()
