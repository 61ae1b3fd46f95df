"""How a fleet is run: who may reach its Ray, what Ray tells of it, how it ends, and what a hang costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fleets import CHATS, Fleet, chat, check, program, run

from serving import fleet, wire

ILL = 240.0  # seconds until a replica that hangs is ended: three health checks of 30 s, and a busy machine
KNOCK = """
import ray
try:
    ray.init(address="auto", logging_level="CRITICAL", log_to_driver=False)
except Exception as error:
    print("refused", type(error).__name__, str(error)[:200])
else:
    print(len(ray.nodes()), "node")
"""


@pytest.mark.usefixtures("pair")
def test_only_who_has_the_token_reaches_ray() -> None:
    assert program(KNOCK) == "1 node"
    for words in ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "disabled"}):
        said = program(KNOCK, **words)
        assert said.startswith("refused"), said


def test_ray_reports_nothing_home(pair: Fleet) -> None:
    """What Ray's own processes were started with holds for all."""
    own = {pid: _read(pid, "cmdline").partition(b"\0")[0] for pid in fleet.processes(pair.pid, b"/")}
    for name in (b"/gcs_server", b"/raylet"):
        [pid] = [pid for pid, word in own.items() if word.endswith(name)]
        said = _read(pid, "environ").split(b"\0")
        assert b"RAY_USAGE_STATS_ENABLED=0" in said and b"RAY_worker_niceness=0" in said


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def test_a_conversation_stays_with_its_replica(pair: Fleet) -> None:
    """Eight talks of three turns by turns, so that the idler of two would be any: later turns are known."""
    before = run(fleet.samples(pair.port, "mars_front_routes_total"))

    async def talks() -> list[fleet.Told]:
        said: list[fleet.Told] = []
        messages: list[list[dict[str, str]]] = [[] for _ in range(8)]
        for turn in range(3):
            for number, talk in enumerate(messages):
                words = "over and over again " * (20 if turn == 0 else 1)  # more than a piece of a prompt
                talk.append({"role": "user", "content": f"talk {number} {words}"})
                said.append(await fleet.ask(pair.port, {"messages": talk, "max_tokens": 8}))
                talk.append({"role": "assistant", "content": said[-1].text})
        return said

    said = run(talks())
    assert {(told.status, told.code, told.broken) for told in said} == {(200, "", "")}
    after = run(fleet.samples(pair.port, "mars_front_routes_total"))
    routes = {
        name: sum(v - before.get(k, 0) for k, v in after.items() if f'route="{name}"' in k)
        for name in ("conversation", "beginning", "balance", "spill")
    }
    # Of a second turn one beginning is known, the first question; of a third turn more.
    assert routes == {"conversation": 8, "beginning": 8, "balance": 8, "spill": 0}
    assert all(told.cached > 0 for told in said[8:]), "a later turn finds its beginning"


@pytest.mark.slow
def test_the_requests_of_a_replica_that_is_frozen_go_elsewhere(pair: Fleet) -> None:
    """Its bodies, of which nothing went out, begin anew once it counts as ill. Ray ends a process by asking
    it, which this one cannot hear: it is replaced once it is killed.
    """
    hung, running = fleet.processes(pair.pid)[0], "mars_num_requests_running"

    async def asked() -> list[tuple[int, str]]:
        bodies = [json.dumps(chat(i)).encode() for i in range(8)]
        asks = [asyncio.create_task(wire.post(pair.port, "/v1/chat/completions", body)) for body in bodies]
        while sum((await fleet.samples(pair.port, running)).values()) < len(asks):
            assert not any(ask.done() for ask in asks), "the requests are too short for this test"
        os.kill(hung, signal.SIGSTOP)
        return await asyncio.wait_for(asyncio.gather(*asks), ILL)

    for i, (status, body) in enumerate(run(asked())):
        assert status == 200, body
        assert json.loads(body)["choices"][0]["message"]["content"] == pair.expected[i % CHATS]
    os.kill(hung, signal.SIGKILL)
    until = time.monotonic() + ILL
    while hung in (there := fleet.processes(pair.pid)) or len(there) != 2:
        assert time.monotonic() < until, f"{hung} of {there} is not replaced"
        time.sleep(0.5)
    run(fleet.wait_for(pair.port, 2))
    check(run(fleet.closed(pair.port, [chat(i) for i in range(CHATS)], 4)), pair.expected)


def test_running_answers_end_before_the_fleet_does(serve: Callable[..., Any]) -> None:
    with serve() as closing:

        async def ended() -> list[fleet.Told]:
            asks = [asyncio.create_task(fleet.ask(closing.port, chat(i))) for i in range(4)]
            while not any((await fleet.samples(closing.port, "mars_num_requests_running")).values()):
                await asyncio.sleep(0.01)
            os.kill(closing.pid, signal.SIGTERM)
            return await asyncio.gather(*asks)

        answers = run(ended())
        assert check(answers, closing.expected)["whole"] == 4
        until = time.monotonic() + 60
        while closing.server.is_alive:
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.2)
