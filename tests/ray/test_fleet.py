"""Two replicas behind one address: every request is answered once, whatever happens to the replicas."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fleets import CHATS, Fleet, chat, check, run
from support.tiny import Named

from serving import fleet, wire

KILLS = int(os.environ.get("MARS_RAY_KILLS", "20"))


def test_four_hundred_requests_are_answered_once_with_the_text_of_one_process(pair: Fleet) -> None:
    answers = run(fleet.closed(pair.port, [chat(i) for i in range(400)], 16))
    assert check(answers, pair.expected) == {
        "requests": 400,
        "whole": 400,
        "ended_by_an_error": 0,
        "wrong": {},
    }
    shares = run(fleet.samples(pair.port, "mars_generation_tokens_total"))
    assert len(shares) == 2 and min(shares.values()) > 0.2 * sum(shares.values())
    counted = run(fleet.samples(pair.port, "mars_front_requests_total"))
    assert counted == {'model="tiny",outcome="answered"'.replace("tiny", pair.bundle.name): 400.0}


def test_one_page_has_the_metrics_of_all_replicas(pair: Fleet) -> None:
    status, page = run(wire.get(pair.port, "/metrics"))
    assert status == 200
    names = set(re.findall(r'replica="(\w+)"', page))
    assert len(names) == 2
    assert len(re.findall(r"^# TYPE mars_forwards_total counter$", page, flags=re.MULTILINE)) == 1
    _, listed = run(wire.get(pair.port, "/v1/models"))
    assert json.loads(listed)["data"][0]["mars"]["replicas"] == 2


def test_a_running_stream_is_steered(pair: Fleet) -> None:
    async def steered() -> tuple[int, str]:
        async with wire.connection(pair.port) as (reader, writer):
            data = json.dumps(chat(0, stream=True)).encode()
            writer.write(wire.head("POST", "/v1/chat/completions", len(data)) + data)
            _, headers = await wire.read_head(reader)
            async for chunk in wire.events(reader, headers):
                path = f"/v1/mars/streams/{chunk['id']}"
                return await wire.post(pair.port, path, b'{"tau": 1}')
        return 0, ""

    # On a machine that is slow the stream may be over before it is steered.
    tries = [run(steered()) for _ in range(5)]
    assert {status for status, _ in tries} <= {200, 404}
    assert any(status == 200 and json.loads(body)["mars"]["tau"] == 1 for status, body in tries), tries


def test_a_client_that_leaves_leaves_nothing_running(pair: Fleet) -> None:
    async def leave() -> None:
        async with wire.connection(pair.port) as (reader, writer):
            data = json.dumps(chat(1, stream=True)).encode()
            writer.write(wire.head("POST", "/v1/chat/completions", len(data)) + data)
            await reader.read(300)

    for _ in range(10):
        run(leave())
    until = time.monotonic() + 20
    while any(run(fleet.samples(pair.port, "mars_num_requests_running")).values()):
        assert time.monotonic() < until, "they run on"
    check(run(fleet.closed(pair.port, [chat(i) for i in range(CHATS)], 4)), pair.expected)


def test_what_a_killed_replica_had_is_retried_or_ends_with_an_error(pair: Fleet) -> None:
    """As often as the issue asks for: nothing lost, nothing doubled, and the replica comes back."""
    draw, ended = random.Random(20), 0
    for number in range(KILLS):
        asked = [chat(i) for i in range(40)]
        wait = draw.random() * 0.8
        answers = run(fleet.kill_one(pair.port, pair.pid, asked, 12, wait, draw))
        ended += check(answers, pair.expected)["ended_by_an_error"]
        run(fleet.wait_for(pair.port, 2))
        assert len(fleet.processes(pair.pid)) == 2, number
    assert ended > 0, "no stream was ever hit: the requests are too short for this test"
    retries = sum(run(fleet.samples(pair.port, "mars_front_retries_total")).values())
    assert retries >= 0
    check(run(fleet.closed(pair.port, [chat(i) for i in range(CHATS)], 4)), pair.expected)


def test_whole_answers_survive_a_kill_unnoticed(pair: Fleet) -> None:
    """Nothing of a body goes out before its end, so all of them are retried."""

    async def killed() -> list[tuple[int, str]]:
        bodies = [json.dumps(chat(i)).encode() for i in range(24)]
        path = "/v1/chat/completions"
        asks = [asyncio.create_task(wire.post(pair.port, path, body)) for body in bodies]
        await asyncio.sleep(0.15)
        os.kill(fleet.processes(pair.pid)[0], signal.SIGKILL)
        return await asyncio.gather(*asks)

    before = sum(run(fleet.samples(pair.port, "mars_front_retries_total")).values())
    for i, (status, body) in enumerate(run(killed())):
        assert status == 200, body
        assert json.loads(body)["choices"][0]["message"]["content"] == pair.expected[i % CHATS]
    assert sum(run(fleet.samples(pair.port, "mars_front_retries_total")).values()) > before
    run(fleet.wait_for(pair.port, 2))


def test_a_slow_replica_holds_up_nobody_else(pair: Fleet) -> None:
    """One is stopped for five seconds: what it has waits for it, what comes meanwhile goes elsewhere."""

    async def slow() -> tuple[list[Any], list[Any], float]:
        before = asyncio.create_task(fleet.closed(pair.port, [chat(i) for i in range(8)], 8))
        await asyncio.sleep(0.05)
        pid = fleet.processes(pair.pid)[0]
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            meanwhile = [asyncio.create_task(fleet.ask(pair.port, chat(i))) for i in range(CHATS)]
            done, _ = await asyncio.wait(meanwhile, timeout=5)
        finally:
            os.kill(pid, signal.SIGCONT)
        share = len(done) / len(meanwhile)
        assert time.monotonic() - began < 15
        return await before, [await task for task in meanwhile], share

    before, meanwhile, share = run(slow())
    check(before, pair.expected)
    assert check(meanwhile, pair.expected)["whole"] == CHATS
    assert share >= 0.5
    run(fleet.wait_for(pair.port, 2))


def test_without_its_controller_the_fleet_goes_on_and_gets_it_back(pair: Fleet) -> None:
    pair.kill(b"ray::ServeController")
    answers = run(fleet.closed(pair.port, [chat(i) for i in range(60)], 8))
    assert check(answers, pair.expected)["whole"] == 60
    until = time.monotonic() + 60
    while not fleet.processes(pair.pid, b"ray::ServeController"):
        assert time.monotonic() < until
        time.sleep(0.2)
    run(fleet.kill_one(pair.port, pair.pid, [chat(0)], 1, 0.0, random.Random(0)))
    run(fleet.wait_for(pair.port, 2))


@pytest.mark.parametrize("name", [b"ray::ServeReplica:mars:mars-front", b"ray::ProxyActor"])
def test_what_stands_before_the_replicas_comes_back(pair: Fleet, name: bytes) -> None:
    before = fleet.processes(pair.pid)
    pair.kill(name)
    until = time.monotonic() + 90
    while fleet.complaint(run(fleet.ask(pair.port, chat(3))), pair.expected[3]):
        assert time.monotonic() < until
        time.sleep(0.5)
    assert fleet.processes(pair.pid) == before, "no replica went with it"
    check(run(fleet.closed(pair.port, [chat(i) for i in range(CHATS)], 4)), pair.expected)


def test_the_log_has_no_prompt(pair: Fleet) -> None:
    assert "say 7" not in pair.server.log.read_text(encoding="utf-8", errors="replace")


def test_a_full_queue_is_429_in_the_form_of_openai(serve: Callable[..., Any]) -> None:
    with serve("--max-rows", "1", "--max-waiting", "2", replicas="1") as small:

        async def crowd() -> list[tuple[int, dict[str, str], str]]:
            async def one(i: int) -> tuple[int, dict[str, str], str]:
                async with wire.connection(small.port) as (reader, writer):
                    data = json.dumps(chat(i)).encode()
                    writer.write(wire.head("POST", "/v1/chat/completions", len(data)) + data)
                    status, headers = await wire.read_head(reader)
                    lines = [line.decode() async for line in wire.body_lines(reader, headers)]
                    return status, headers, "\n".join(lines)

            return await asyncio.gather(*(one(i) for i in range(30)))

        answers = run(crowd())
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
        for status, headers, body in answers:
            if status == 429:
                error = json.loads(body)["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
                assert int(headers["retry-after"]) >= 1
        for i, (status, _, body) in enumerate(answers):
            if status == 200:
                text = json.loads(body)["choices"][0]["message"]["content"]
                assert text == small.expected[i % CHATS]


def test_replicas_grow_with_the_load(serve: Callable[..., Any]) -> None:
    with serve("--max-rows", "2", replicas="1:2") as grown:

        async def load() -> int:
            until = time.monotonic() + 150
            while (number := await fleet.replicas(grown.port)) < 2 and time.monotonic() < until:
                check(await fleet.closed(grown.port, [chat(i) for i in range(60)], 8), grown.expected)
            return number

        assert run(load()) == 2


def test_two_bundles_by_name_behind_a_key(serve: Callable[..., Any], bundles: Named, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with serve(str(bundles("mistral")), "--api-key-file", str(keys), replicas="1") as closed:
        body = json.dumps(chat(0)).encode()
        assert run(wire.post(closed.port, "/v1/chat/completions", body))[0] == 401
        assert run(wire.get(closed.port, "/metrics"))[0] == 401
        status, data = run(wire.post(closed.port, "/v1/chat/completions", body, key="secret"))
        assert status == 200 and json.loads(data)["choices"][0]["message"]["content"] == closed.expected[0]
        body = json.dumps(chat(0, model="mistral")).encode()
        status, data = run(wire.post(closed.port, "/v1/chat/completions", body, key="secret"))
        assert status == 200 and json.loads(data)["model"] == "mistral"
        assert json.loads(data)["choices"][0]["message"]["content"] != closed.expected[0]
        _, listed = run(wire.get(closed.port, "/v1/models", "secret"))
        assert [entry["id"] for entry in json.loads(listed)["data"]] == ["llama", "mistral"]
        assert "secret" not in closed.server.log.read_text(encoding="utf-8", errors="replace")


def test_a_folder_that_is_no_bundle_is_refused_at_once(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "empty.bundle").mkdir()
    with pytest.raises(SystemExit, match="code 1"):  # noqa: SIM117
        with serve(str(tmp_path / "empty.bundle"), replicas="1"):
            pass
