"""benchmarks/serve_load.py on a tiny bundle: its clients see what happens, every habit meets its answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.tiny import Named

need("uvicorn", "serve")

from support.fake_serve import FakeServe, Running, tokens_of  # noqa: E402
from support.served import Serving, serving  # noqa: E402

import serve_load  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402
from serving import habits, loops, soak, wire  # noqa: E402
from serving.figures import growth, percentiles, table  # noqa: E402
from serving.wire import Answer  # noqa: E402

CHATS = [{"messages": [{"role": "user", "content": f"say {i}"}], "max_tokens": 6} for i in range(4)]


@pytest.fixture(scope="module")
def server(sessions: Sessions) -> Iterator[Serving]:
    with serving({"tiny": sessions(MAIN)}, ServeOptions(max_body=1 << 20, header_timeout=0.5)) as running:
        yield running


def port(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


def test_a_stream_is_read_as_it_was_meant() -> None:
    fake = FakeServe([tokens_of("one two three four five six")], pace=0.001)
    with Running(fake.app()) as address:
        answer = asyncio.run(wire.stream(port(address), {"messages": [], "exact": True}))
    assert (answer.status, answer.text, answer.finish) == (200, "one two three four five six", "stop")
    assert (answer.tokens, answer.timings["forwards"], answer.used["exact"]) == (6, 2, True)
    assert 0 < (answer.first or 0) <= answer.seconds


def test_loops_count_answers_refusals_and_failures() -> None:
    fake = FakeServe([tokens_of("a b c")], pace=0.01)
    with Running(fake.app()) as address:
        ask = loops.asker(port(address), {"tau": 0.5})
        made = asyncio.run(loops.closed(ask, CHATS * 3, 3))
        assert made.figures(slo=60)["goodput"] == made.figures()["requests_per_second"] > 0
        assert [made.figures()[name] for name in ("requests", "whole", "failed")] == [12, 12, {}]
        assert made.figures()["tokens_per_forward"] == 3.0
        assert sorted(number for number, _ in made.answers) == list(range(12))
        assert all(request["tau"] == 0.5 for request in fake.requests)
        fake.refusal = "full"
        made = asyncio.run(loops.opened(ask, CHATS, 200.0, 0))
        assert made.figures()["refused"] == {429: 4} and made.figures(1)["goodput"] == 0
    made = asyncio.run(loops.closed(ask, CHATS, 2))
    assert made.figures()["failed"] == {"ConnectionRefusedError": 4}


@pytest.mark.parametrize("name", sorted(habits.HABITS))
def test_every_habit_finds_its_answer(server: Serving, name: str) -> None:
    [asked, *_] = asyncio.run(soak.references(server.port, CHATS[:1]))
    habit = habits.HABITS[name][0]
    outcomes = {
        "read": {"whole"},
        "plain": {"whole"},
        "slow": {"slowly"},
        "steer": {"steered"},
        "leave": {"left"},
        "dribble": {"shut out", "gave up"},
        "malformed": {"refused"},
        "path": {"refused", "shut out"},
        "raw": {"refused", "shut out"},
        "oversized": {"refused", "shut out"},
    }
    for seed in range(1 if name == "dribble" else 3):
        told = asyncio.run(habit(server.port, asked, random.Random(seed)))
        assert told.wrong is None
        assert told.outcome in outcomes[name]


def test_a_wrong_text_is_noticed(server: Serving) -> None:
    [asked, *_] = asyncio.run(soak.references(server.port, CHATS[:1]))
    other = habits.Asked(asked.body, asked.alone + "!")
    for habit in (habits.read, habits.plain, habits.slow, habits.steer):
        told = asyncio.run(habit(server.port, other, random.Random(0)))
        assert told.wrong is not None and "is not" in told.wrong


def test_a_5xx_and_an_answer_to_rubbish_are_wrong() -> None:
    assert habits._refused(503, "x").wrong == "x got 503"
    assert habits._refused(200, "x").wrong == "x got 200"
    full = Answer(429, headers={})
    assert habits._judge(full, habits.Asked({}, "")).wrong == "429 without Retry-After"


@dataclass
class Watched:
    """A server in this process, for a soak to watch."""

    port: int
    memory: int = 5 << 20
    is_alive: bool = True


def test_a_short_soak(server: Serving, tmp_path: Path) -> None:
    asked = asyncio.run(soak.references(server.port, CHATS))
    watched: Any = Watched(server.port)
    run = soak.Soak(watched, asked, 4, 40, 0.1, 1, tmp_path / "journal.jsonl", every=0.2)
    found = asyncio.run(run.run())
    assert (found["wrong_words"], found["wrong"], found["server_alive"]) == ([], 0, True)
    assert found["requests"] == sum(found["outcomes"].values()) >= 40
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert lines[-1]["requests"] == found["requests"]
    assert all(line["memory_mib"] == 5 for line in lines)


def test_figures() -> None:
    assert percentiles([]) == {}
    assert percentiles([1.0, 2.0, 3.0])["p50"] == 2.0
    flat = growth([0, 600, 1200, 1800, 2400, 3600], [0, 100 << 20, *[200 << 20] * 4])
    assert flat["slope_mib_per_hour"] == pytest.approx(0, abs=1e-6) and flat["most_mib"] == 200
    rises = growth(list(range(0, 3600, 600)), [i << 20 for i in range(6)])
    assert rises["slope_mib_per_hour"] == pytest.approx(6)
    assert table([{"a": {"b": 1.23456}, "c": None}], ("a.b", "c")).splitlines()[2] == "| 1.235 |  |"


@pytest.mark.parametrize("words", ["exact", "one-token", "tau=0.9", "profile=a@0.02"])
def test_settings_as_they_are_written(words: str) -> None:
    assert len(serve_load.fields(words)) == 1
    with pytest.raises(Exception, match="is not exact"):
        serve_load.fields(words + "?" if words in ("exact", "one-token") else "tau")


def test_closed_from_the_command_line(bundles: Named, tmp_path: Path) -> None:
    """A server of its own, in a process of its own."""
    words = ["closed", bundles(MAIN), "--clients", 2, "--each", 2, "--rounds", 2, "--check", 2]
    words += ["--max-tokens", 4, "--threads", 1, "--logs", tmp_path, "--json", tmp_path / "out.json"]
    serve_load.main([str(word) for word in words])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["whole"] for row in found["rounds"]] == [2, 2]
    assert all(row["differ"] == 0 and not row["failed"] and not row["refused"] for row in found["rounds"])
    assert str(tmp_path) not in found["about"]["command"]
