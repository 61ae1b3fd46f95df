"""Two replicas behind one address answer as one server does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fleets import CHATS, Fleet, Told, ask, chat, check, closed, program, run, samples, wait_for
from support.tiny import Named

from serving import wire

RUNNING = "mars_num_requests_running"
KNOCK = """
import ray
try:
    ray.init(address="auto", logging_level="CRITICAL", log_to_driver=False)
except Exception as error:
    print("refused", type(error).__name__, str(error)[:200])
else:
    print(len(ray.nodes()), "node")
"""


def test_requests_have_the_text_of_one_process_and_both_replicas_work(pair: Fleet) -> None:
    check(run(closed(pair.port, range(200), 16)), pair.expected)
    shares = run(samples(pair.port, "mars_generation_tokens_total"))
    assert len(shares) == 2 and min(shares.values()) > 0.2 * sum(shares.values())


def test_one_page_has_the_metrics_of_all_replicas(pair: Fleet) -> None:
    status, page = run(wire.get(pair.port, "/metrics"))
    assert status == 200
    assert len(set(re.findall(r'replica="(\w+)"', page))) == 2
    assert len(re.findall(r"^# TYPE mars_forwards_total counter$", page, flags=re.MULTILINE)) == 1


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
    while any(run(samples(pair.port, RUNNING)).values()):
        assert time.monotonic() < until, "they run on"
    check(run(closed(pair.port, range(CHATS), 4)), pair.expected)


def test_a_conversation_stays_with_its_replica(pair: Fleet) -> None:
    """Eight talks of three turns by turns, so that the idler of two would be any: later turns are known."""

    async def talks() -> list[Told]:
        said: list[Told] = []
        messages: list[list[dict[str, str]]] = [[] for _ in range(8)]
        for turn in range(3):
            for number, talk in enumerate(messages):
                words = "over and over again " * (20 if turn == 0 else 1)  # more than a piece of a prompt
                talk.append({"role": "user", "content": f"talk {number} {words}"})
                said.append(await ask(pair.port, {"messages": talk, "max_tokens": 8}, f"talk-{number}"))
                talk.append({"role": "assistant", "content": said[-1].text})
        return said

    said = run(talks())
    assert all(told.is_whole for told in said)
    assert all(told.cached > 0 for told in said[8:]), "a later turn finds its beginning"


def test_a_killed_replica_ends_its_own_answers_only_and_comes_back(pair: Fleet) -> None:
    async def killed() -> list[Told]:
        running = asyncio.create_task(closed(pair.port, range(60), 12))
        await asyncio.sleep(0.3)
        os.kill(pair.processes()[0], signal.SIGKILL)
        return await running

    answers = run(killed())
    for number, told in enumerate(answers):
        text = pair.expected[number % CHATS]
        assert told.text == text if told.is_whole else text.startswith(told.text), told
    assert sum(told.is_whole for told in answers) >= 60 - 12 - 6
    run(wait_for(pair.port, 2))
    check(run(closed(pair.port, range(CHATS), 4)), pair.expected)


def test_a_slow_replica_holds_up_few_others(pair: Fleet) -> None:
    """One is stopped: what it has waits for it, and as its queue grows, what comes goes elsewhere."""

    async def slow() -> tuple[list[Told], int]:
        pid = pair.processes()[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            asks = []
            for number in range(30):
                asks.append(asyncio.create_task(ask(pair.port, chat(number))))
                await asyncio.sleep(0.3)
            done, _ = await asyncio.wait(asks, timeout=5)
        finally:
            os.kill(pid, signal.SIGCONT)
        return await asyncio.gather(*asks), len(done)

    answers, num_done = run(slow())
    check(answers, pair.expected)
    assert num_done >= 15
    run(wait_for(pair.port, 2))


def test_the_log_has_no_prompt(pair: Fleet) -> None:
    assert "say 7" not in pair.server.log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.usefixtures("pair")
def test_only_who_has_the_token_reaches_ray() -> None:
    assert program(KNOCK) == "1 node"
    for words in ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "disabled"}):
        said = program(KNOCK, **words)
        assert said.startswith("refused"), said


def test_ray_reports_nothing_home(pair: Fleet) -> None:
    """What Ray's own processes were started with holds for all."""
    for name in (b"/gcs_server", b"/raylet"):
        [pid] = [
            pid
            for pid in pair.processes(b"/")
            if Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(name)
        ]
        said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"RAY_USAGE_STATS_ENABLED=0" in said and b"RAY_worker_niceness=0" in said


def test_a_full_queue_is_429_in_the_form_of_openai(serve: Callable[..., Any]) -> None:
    with serve("--max-rows", "1", "--max-waiting", "2", replicas="1") as small:
        answers = run(closed(small.port, range(30), 30))
        whole = [(i, told) for i, told in enumerate(answers) if told.is_whole]
        assert len(whole) >= 3 and all(told.text == small.expected[i % CHATS] for i, told in whole)
        refused = [told for told in answers if not told.is_whole]
        assert refused and {told.status for told in refused} == {429}
        for told in refused:
            error = json.loads(told.error)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
            assert int(told.headers["retry-after"]) >= 1


def test_replicas_grow_with_the_load(serve: Callable[..., Any]) -> None:
    with serve("--max-rows", "2", replicas="1:2") as grown:

        async def load() -> int:
            until = time.monotonic() + 150
            while (number := len(await samples(grown.port, RUNNING))) < 2 and time.monotonic() < until:
                check(await closed(grown.port, range(60), 8), grown.expected)
            return number

        assert run(load()) == 2


def test_two_bundles_by_name_behind_a_key(serve: Callable[..., Any], bundles: Named, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with serve(str(bundles("mistral")), "--api-key-file", str(keys), replicas="1") as closed_one:
        port = closed_one.port
        body = json.dumps(chat(0)).encode()
        assert run(wire.post(port, "/v1/chat/completions", body))[0] == 401
        assert run(wire.get(port, "/metrics"))[0] == 401
        status, data = run(wire.post(port, "/v1/chat/completions", body, key="secret"))
        assert status == 200
        assert json.loads(data)["choices"][0]["message"]["content"] == closed_one.expected[0]
        body = json.dumps(chat(0, model="mistral")).encode()
        status, data = run(wire.post(port, "/v1/chat/completions", body, key="secret"))
        assert status == 200 and json.loads(data)["model"] == "mistral"
        assert json.loads(data)["choices"][0]["message"]["content"] != closed_one.expected[0]
        _, listed = run(wire.get(port, "/v1/models", "secret"))
        assert [entry["id"] for entry in json.loads(listed)["data"]] == ["llama", "mistral"]
        assert "secret" not in closed_one.server.log.read_text(encoding="utf-8", errors="replace")


def test_a_folder_that_is_no_bundle_is_refused_at_once(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "empty.bundle").mkdir()
    with pytest.raises(SystemExit, match="code 1"):  # noqa: SIM117
        with serve(str(tmp_path / "empty.bundle"), replicas="1"):
            pass


def test_running_answers_end_before_the_fleet_does(serve: Callable[..., Any]) -> None:
    with serve() as closing:

        async def ended() -> list[Told]:
            asks = [asyncio.create_task(ask(closing.port, chat(i))) for i in range(4)]
            while not any((await samples(closing.port, RUNNING)).values()):
                await asyncio.sleep(0.01)
            os.kill(closing.server.pid, signal.SIGTERM)
            return await asyncio.gather(*asks)

        check(run(ended()), closing.expected)
        until = time.monotonic() + 60
        while closing.server.is_alive:
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.2)
