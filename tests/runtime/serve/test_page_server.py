"""The page and its server: one that refuses, one that goes, one below a prefix, and the real one."""

from __future__ import annotations

import time
from typing import Any

from support.agreement import MAIN
from support.fake import Recording
from support.fixtures import Sessions
from support.missing import need
from support.page import FOREVER, WORDS, Open, ask, ended, runs, slide, write

from mars_export import Session
from mars_export.runtime.decode.backend import StepOutput

need("uvicorn", "serve")

from starlette.applications import Starlette  # noqa: E402
from starlette.routing import Mount  # noqa: E402
from support.fake_serve import FakeServe, Running, tokens_of  # noqa: E402
from support.served import serving, until  # noqa: E402


def port(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


def test_a_refusal_is_shown(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")], refusal="the queue is full; come back")
    tab = visit(fake)
    ask(tab, "go")
    assert "the queue is full; come back" in tab.locator("article").inner_text()
    fake.refusal = ""
    ask(tab, "again")
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
    ask(tab, "again")
    assert "cannot be reached" in tab.locator("article .note.bad").last.inner_text()
    tab.get_by_role("status", name="Server").get_by_text("no server").wait_for()
    with Running(fake.app(), port(address)):
        tab.get_by_role("status", name="Server").get_by_text("ready").wait_for()


def test_below_a_prefix(visit: Open) -> None:
    """Mounted in another application, under a path of its own."""
    fake = FakeServe([tokens_of("fine")])
    with Running(Starlette(routes=[Mount("/models/mars", fake.app())])) as address:
        tab = visit(f"{address}models/mars/")
        ask(tab, "go")
        assert tab.locator("article .text").inner_text() == "fine"


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
    session = Session(quick.bundle, quick.variant, backend, quick.text)
    with serving({"tiny": session}) as server:
        tab = visit(f"{server.url}/")
        tab.get_by_role("button", name="Settings").click()
        tab.get_by_label("Most tokens").fill("90")
        tab.get_by_label("Masks").select_option("full")
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
        ask(tab, "exactly")
        assert tab.locator("article .mode").last.inner_text() == "exact"
        assert tab.locator("article .note.bad").all_inner_texts() == [""] * 3
