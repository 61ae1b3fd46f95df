"""Fleets on a real Ray. They take minutes and a Python that has the extra ray: `make ray` runs them, nothing
else collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.fleets import CHATS, PYTHON, Fleet, closed, command, run
from support.tiny import Named

from serving.server import Server

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def expected(bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of the server without Ray, one request at a time."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with Server(command(bundles("llama"), "--port", "{port}"), log) as server:
        answers = run(closed(server.port, range(CHATS), 1))
    assert all(told.is_whole for told in answers)
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
        words = command(bundle, "--port", "{port}", "--ray", "--replicas", replicas, *more)
        with Server(words, log) as server:
            yield Fleet(server, bundle, expected)

    return started


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Any]) -> Iterator[Fleet]:
    """Two replicas of one thread."""
    with serve() as started:
        yield started
