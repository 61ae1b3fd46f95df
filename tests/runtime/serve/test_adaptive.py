"""Which level of load gets which setting: the rule alone, and through a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.stalling import Paced

need("uvicorn", "serve")

from support.served import profiled, serving, until  # noqa: E402

from mars_export import Limits, Session, SessionError  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402
from mars_export.runtime.serve.adaptive import Adaptive, read_levels  # noqa: E402
from mars_export.runtime.serve.models import Models  # noqa: E402

NAMES = ("exact", "near@0.01", "far@0.02")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rule(clock: Clock) -> Adaptive:
    return Adaptive(ServeOptions(adaptive=NAMES, high_queue=0.5, low_queue=0.1, hold=5.0), clock)


@pytest.mark.parametrize(
    "script",  # (seconds since the last wait, seconds of a wait, level after it)
    [
        # Waiting makes it faster, one level in `hold` seconds, and never faster than the last.
        [(0, 0.0, 0), (0, 0.5, 1), (0, 9.0, 1), (4.9, 9.0, 1), (0.1, 9.0, 2), (50, 9.0, 2)],
        # It comes back level by level when all was quiet.
        [(0, 1.0, 1), (5, 1.0, 2), (4.9, 0.0, 2), (0.1, 0.0, 1), (0, 0.0, 1), (5, 0.0, 0), (50, 0.0, 0)],
        # A long quiet brings it back at once.
        [(0, 1.0, 1), (5, 1.0, 2), (3600, 0.0, 0)],
        # Between the two limits nothing changes, and each such wait begins the quiet anew.
        [(0, 0.5, 1), *[(1, 0.3, 1)] * 100, (4, 0.0, 1), (0, 0.2, 1), (4, 0.0, 1), (1, 0.0, 0)],
    ],
)
def test_the_rule(script: list[tuple[float, float, int]], rule: Adaptive, clock: Clock) -> None:
    for seconds, waited, level in script:
        clock.now += seconds
        assert rule.level(waited, choose=True) == level


@pytest.fixture
def slow(sessions: Sessions) -> Iterator[tuple[Session, Paced]]:
    session = sessions(MAIN)
    pace = Paced(session.backend)
    bundle = profiled(session, {"near@0.01": 0.9, "far@0.02": 0.3})
    yield Session(bundle, session.variant, pace), pace
    pace.open()


def test_levels_are_tested_profiles_in_order(slow: tuple[Session, Paced]) -> None:
    session, _ = slow
    levels = read_levels(session, NAMES)
    assert [level.tau for level in levels.values()] == [None, 0.9, 0.3]
    for wrong, words in [
        (("near@0.01", "exact"), "name it first"), (("exact", "far@0.02", "near@0.01"), "most careful"),
        (("exact", "stale"), "stale"), (("exact", "nothing"), "no profile"),
    ]:  # fmt: skip
        with pytest.raises(SessionError, match=words):
            read_levels(session, wrong)


def test_compiling_is_no_load(slow: tuple[Session, Paced], monkeypatch: pytest.MonkeyPatch) -> None:
    """The level follows waits for a row; the histograms begin at the arrival."""
    session, _ = slow
    options = ServeOptions(adaptive=NAMES, high_queue=1.0)
    made, taken = session.new_sequence, Models.take
    spent = 0.0

    def new_sequence(*arguments: Any, **named: Any) -> Any:
        time.sleep(spent)
        return made(*arguments, **named)

    async def take(*arguments: Any) -> Any:
        await asyncio.sleep(spent)
        return await taken(*arguments)

    monkeypatch.setattr(session, "new_sequence", new_sequence)
    monkeypatch.setattr(Models, "take", take)
    with serving({"tiny": session}, options) as server:
        spent = 0.6
        answer = server.chat(max_tokens=2).json
        assert answer["timings"]["queue_ms"] >= 1200
        assert server.chat(max_tokens=2).json["mars"]["level"] == "exact"
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
            until(lambda name=name: server.metric(f"mars_{name}_seconds_sum", model="tiny") >= 2.4)


def test_a_profile_is_a_model_name(slow: tuple[Session, Paced]) -> None:
    session, _ = slow
    with serving({"tiny": session}) as server:
        names = [entry["id"] for entry in server.call("/v1/models").json["data"]]
        assert names == ["tiny", "tiny:near@0.01", "tiny:far@0.02"], "stale ones are not offered"
        by_name = server.chat(model="tiny:far@0.02", max_tokens=8)
        by_field = server.chat(model="tiny", profile="far@0.02", max_tokens=8)
        for answer in (by_name, by_field):
            mars = answer.json["mars"]
            assert (mars["profile"], mars["tau"], mars["masks"]) == ("far@0.02", 0.3, "full")
        assert by_name.json["model"] == "tiny:far@0.02"
        assert by_name.json["choices"] == by_field.json["choices"]
        assert server.chat(model="tiny:far@0.02", tau=0.5).status == 400
        assert server.chat(profile="near@0.01", exact=True).status == 400
        assert server.chat(model="tiny:stale").status == 404
        stale = server.chat(profile="stale")
        assert stale.status == 400 and "calibrate" in stale.json["error"]["message"]


def test_the_load_chooses(slow: tuple[Session, Paced], clock: Clock) -> None:
    session, pace = slow
    limits = Limits(max_rows=1, max_waiting=8)
    options = ServeOptions(limits, adaptive=NAMES, high_queue=0.4, low_queue=0.3)
    with serving({"tiny": session}, options) as server, ThreadPoolExecutor(8) as pool:
        [model] = server.door.service.models.opened.values()
        model.adaptive = Adaptive(options, clock)
        calm = server.chat(max_tokens=4).json["mars"]
        assert (calm["level"], calm["exact"], calm["profile"]) == ("exact", True, None)
        pace.hold()
        waiting = [pool.submit(server.chat, max_tokens=4)]
        until(lambda: pace.is_waiting)
        for number in (1, 2, 3):
            waiting.append(pool.submit(server.chat, max_tokens=4))
            until(lambda n=number: server.batcher.num_waiting == n)  # type: ignore[misc]
            until(lambda: server.batcher.longest_wait > options.high_queue)
            assert server.call("/metrics").status == 200  # which changes nothing
            clock.now += options.hold
        asked = pool.submit(server.chat, max_tokens=4, exact=True)
        drawn = pool.submit(server.chat, max_tokens=4, temperature=1.0)
        until(lambda: server.batcher.num_waiting == 5)
        assert server.call("/metrics").data.count(b'mars_adaptive_level{model="tiny"} 2.0') == 1
        pace.open()
        mars = [answer.result().json["mars"] for answer in waiting]
        assert [m["level"] for m in mars] == ["exact", "exact", "near@0.01", "far@0.02"]
        assert [m["tau"] for m in mars] == [None, None, 0.9, 0.3], "kept for the request"
        assert asked.result().json["mars"]["level"] is None, "who asks for something gets it"
        assert drawn.result().json["mars"]["level"] == "exact", "no bound was tested for what is drawn"
        at_far = {"model": "tiny", "outcome": "finished", "level": "far@0.02"}
        until(lambda: server.metric("mars_requests_total", **at_far) == 1)
        clock.now += 2 * options.hold
        assert server.chat(max_tokens=1).json["mars"]["level"] == "exact", "all is quiet again"
