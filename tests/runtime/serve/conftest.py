"""What the tests of the server share: a server, OpenAI's client, and for the page a real Chromium with a tab
on a server whose model is a script (support/fake_serve.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support.agreement import MAIN
from support.browser import browser
from support.fixtures import Sessions
from support.page import Open

from mars_export import Session

if TYPE_CHECKING:
    import openai
    from support.fake_serve import FakeServe
    from support.served import Serving
    from support.stalling import Paced


@pytest.fixture(scope="module")
def session(sessions: Sessions) -> Session:
    return sessions(MAIN)


@pytest.fixture
def slow(session: Session) -> Iterator[tuple[Session, Paced]]:
    """The session with steps that a test counts out."""
    from support.stalling import paced  # not all tests here have what it imports

    made = paced(session)
    yield made
    made[1].open()


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Serving]:
    """A server of one model, `tiny`."""
    from support.served import serving

    with serving({"tiny": session}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the module's server."""
    import openai  # the tests of the page do without it

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as instance:
        yield instance


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Opens the page of a fake. Whatever a test does, the console is silent and nothing leaves the house."""
    from support.fake_serve import Running  # most tests beside these do without what it imports

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
