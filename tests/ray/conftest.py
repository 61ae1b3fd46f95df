"""Fleets on a real Ray. They take minutes and a Python that has the extra ray: `make ray` runs them, nothing
else collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.fleets import CHATS, PYTHON, Fleet, chat, run
from support.tiny import Named

from serving import fleet
from serving.server import Server

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def expected(bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of the server without Ray, one request at a time."""
    log = tmp_path_factory.mktemp("alone") / "log"
    words = [
        PYTHON,
        "-m",
        "mars_export.cli",
        "serve",
        str(bundles("llama")),
        "--port",
        "{port}",
        "--threads",
        "1",
    ]
    with Server(words, log) as server:
        answers = run(fleet.closed(server.port, [chat(i) for i in range(CHATS)], 1))
    assert {(told.status, told.ends, told.broken) for told in answers} == {(200, 2, "")}
    assert len({told.text for told in answers}) == CHATS
    return [told.text for told in answers]


@pytest.fixture(scope="session")
def serve(
    bundles: Named, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    @contextmanager
    def started(*more: str, replicas: str = "2") -> Iterator[Fleet]:
        log = tmp_path_factory.mktemp("fleet") / "log"
        bundle = bundles("llama")
        with Server(fleet.command(PYTHON, bundle, replicas, 1, *more), log) as server:
            yield Fleet(server, bundle, expected)

    return started


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Any]) -> Iterator[Fleet]:
    """Two replicas of one thread."""
    with serve() as started:
        yield started
