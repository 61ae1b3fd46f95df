"""The front over replicas with a script: what is sent on, retried, ended, and asked of all. No Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from support.missing import need
from support.served import HELLO

need("starlette", "serve")

from mars_export.runtime.serve.options import ServeOptions  # noqa: E402
from mars_export.runtime.serve.ray.call import Begun, Call, Lost, Part, Start, Whole, ask, whole  # noqa: E402
from mars_export.runtime.serve.ray.front import new_front  # noqa: E402
from mars_export.runtime.serve.ray.front_metrics import FrontCounters  # noqa: E402
from mars_export.runtime.serve.refusals import Refused  # noqa: E402

JSON = ((b"content-type", b"application/json"),)
STREAM = ((b"content-type", b"text/event-stream"),)


def event(delta: Any = None, **fields: Any) -> bytes:
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]} if delta is not None else fields
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


OPENING = event({"role": "assistant", "content": ""})
FIRST, SECOND, DONE = event({"content": "Hel"}), event({"content": "lo"}), b"data: [DONE]\n\n"
CLOSING = Refused(503, "the server is closing; ask again", code="closing").body
Step = Part | float | Exception


class Scripted:
    """Replicas that do what a script for each attempt says; a number is seconds of silence."""

    def __init__(self, *scripts: Sequence[Step], pages: Sequence[Whole] = ()) -> None:
        self.calls: list[Call] = []
        self.asked: list[Call] = []
        self.closed = 0
        self._scripts, self._pages = list(scripts), pages

    async def send(self, call: Call) -> AsyncGenerator[Part, None]:
        self.calls.append(call)
        try:
            for step in self._scripts[len(self.calls) - 1]:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
        finally:
            self.closed += 1

    async def ask(self, call: Call) -> list[Whole]:
        self.asked.append(call)
        return list(self._pages)


class Fronted:
    """A front over one pool or several."""

    def __init__(self, *pools: Scripted, **options: Any) -> None:
        self.counts = FrontCounters()
        self.pools = {f"model{i}" if i else "tiny": pool for i, pool in enumerate(pools)}
        self.door = new_front(self.pools, ServeOptions(**options), self.counts)

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        return run(lambda: whole(self.door, request(path, body, headers)))

    def chat(self, **fields: Any) -> tuple[int, bytes]:
        return self.call("/v1/chat/completions", {"messages": HELLO, **fields})

    def count(self, metric: str, label: str = "") -> float:
        lines = [line for line in self.counts.text().splitlines() if line.startswith(f"{metric}_total{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


def run(made: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(made(), 20)

    return asyncio.run(bounded())


def request(path: str, body: Any, headers: Mapping[str, str]) -> Call:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = tuple((name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items())
    return Call("GET" if body is None else "POST", path, lines, data)


def answer(text: str, status: int = 200, replica: str = "a") -> list[Step]:
    return [Begun(replica), Start(status, JSON), json.dumps({"text": text}).encode()]


def test_an_answer_comes_as_it_is() -> None:
    pool = Scripted(answer("whole"))
    front = Fronted(pool)
    assert front.chat() == (200, b'{"text": "whole"}')
    [call] = pool.calls
    assert (call.method, call.path, call.avoid) == ("POST", "/v1/chat/completions", frozenset())
    assert len(call.keys) == len(HELLO) and pool.closed == 1
    assert front.count("mars_front_requests", 'outcome="answered"') == 1


@pytest.mark.parametrize("first", [[], [Begun("a")], [Begun("a"), Start(200, JSON), b'{"te']])
def test_a_body_that_breaks_off_is_asked_for_again_elsewhere(first: list[Step]) -> None:
    pool = Scripted([*first, Lost()], answer("again"))
    front = Fronted(pool)
    assert front.chat() == (200, b'{"text": "again"}')
    assert [call.avoid for call in pool.calls] == [frozenset(), frozenset({"a"} if first else ())]
    assert pool.calls[0].body == pool.calls[1].body and pool.closed == 2
    assert front.count("mars_front_retries") == 1


@pytest.mark.parametrize("first", [[], [OPENING], [OPENING, b": ping\n\n"], [OPENING[:20]]])
def test_a_stream_that_said_nothing_begins_anew_unseen(first: list[bytes]) -> None:
    lost = [Begun("a"), Start(200, STREAM), *first, Lost()]
    pool = Scripted(lost, [Begun("b"), Start(200, STREAM), OPENING, FIRST, SECOND + DONE])
    assert Fronted(pool).chat(stream=True) == (200, OPENING + FIRST + SECOND + DONE)
    assert pool.calls[1].avoid == {"a"}


def test_a_stream_that_spoke_ends_with_an_error_and_no_end_mark() -> None:
    pool = Scripted([Begun("a"), Start(200, STREAM), OPENING, FIRST, Lost()])
    front = Fronted(pool)
    status, data = front.chat(stream=True)
    assert status == 200 and data.startswith(OPENING + FIRST) and DONE not in data
    [error] = [json.loads(e[6:])["error"] for e in data.split(b"\n\n")[2:-1]]
    assert error["code"] == "replica_lost" and error["type"] == "service_unavailable_error"
    assert len(pool.calls) == 1, "it is not answered twice"
    assert front.count("mars_front_requests", 'outcome="lost"') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_every_replica_is_not_sent_on_for_ever(stream: bool) -> None:
    pool = Scripted(*([Begun(name), Lost()] for name in "abcd"))
    status, data = Fronted(pool).chat(stream=stream)
    assert status == 503 and json.loads(data)["error"]["code"] == "replica_lost"
    assert [call.avoid for call in pool.calls] == [frozenset(), {"a"}, {"a", "b"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_farewell_is_no_answer(stream: bool) -> None:
    last = json.dumps(CLOSING).encode()
    in_stream = [Begun("a"), Start(200, STREAM), OPENING, b"data: " + last + b"\n\n"]
    farewell = in_stream if stream else [Begun("a"), Start(503, JSON), last]
    again = [Begun("b"), Start(200, STREAM), FIRST + DONE] if stream else answer("again")
    pool = Scripted(farewell, again)
    status, data = Fronted(pool).chat(stream=stream)
    assert (status, data) == (200, FIRST + DONE if stream else b'{"text": "again"}')
    assert len(pool.calls) == 2


def test_other_errors_are_answers() -> None:
    refused = [Begun("a"), Start(429, (*JSON, (b"retry-after", b"3"))), b'{"error": {"code": "overloaded"}}']
    front = Fronted(Scripted(refused))
    parts = run(lambda: _parts(front, stream=True))
    assert parts[0].status == 429 and (b"retry-after", b"3") in parts[0].headers
    assert front.count("mars_front_requests", 'outcome="overloaded"') == 1


async def _parts(front: Fronted, **fields: Any) -> list[Any]:
    call = request("/v1/chat/completions", {"messages": HELLO, **fields}, {})
    return [part async for part in ask(front.door, call)]


def test_who_waits_too_long_for_a_place_is_told() -> None:
    pool = Scripted([5.0, *answer("late")])
    status, data = Fronted(pool, queue_timeout=0.1).chat()
    assert status == 429 and "0.1 s" in json.loads(data)["error"]["message"]
    assert pool.closed == 1


def test_a_long_silence_has_signs_of_life_and_can_still_be_retried() -> None:
    lost = [Begun("a"), Start(200, STREAM), OPENING, 0.3, Lost()]
    pool = Scripted(lost, [Begun("b"), Start(200, STREAM), OPENING, FIRST, DONE])
    status, data = Fronted(pool, ping=0.05).chat(stream=True)
    assert status == 200 and data.count(b": ping\n\n") >= 2
    assert data.replace(b": ping\n\n", b"") == OPENING + FIRST + DONE


def test_a_client_that_leaves_ends_the_call() -> None:
    pool = Scripted([Begun("a"), Start(200, STREAM), OPENING, FIRST, 30.0])
    front = Fronted(pool)

    async def leave() -> None:
        parts = ask(front.door, request("/v1/chat/completions", {"messages": HELLO, "stream": True}, {}))
        async for part in parts:
            if part == OPENING + FIRST or part == FIRST:
                break
        await parts.aclose()

    run(leave)
    assert pool.closed == 1 and front.count("mars_front_requests", 'outcome="left"') == 1


@pytest.mark.parametrize(
    ("fields", "is_drawn"), [({}, False), ({"temperature": 0}, False), ({"temperature": 0.7}, True)]
)
def test_what_is_drawn_gets_its_seed_at_the_front(fields: dict[str, Any], is_drawn: bool) -> None:
    pool = Scripted([Lost()], answer("x"))
    Fronted(pool).chat(**fields)
    seeds = [json.loads(call.body).get("seed") for call in pool.calls]
    assert seeds[0] == seeds[1] and (seeds[0] is not None) is is_drawn


@pytest.mark.parametrize(
    ("fields", "status"), [({"nonsense": 1}, 400), ({"messages": []}, 400), ({"model": "other"}, 404)]
)
def test_what_is_wrong_goes_no_further(fields: dict[str, Any], status: int) -> None:
    pool = Scripted()
    front = Fronted(pool)
    assert front.chat(**fields)[0] == status
    assert pool.calls == [] and front.count("mars_front_requests", 'outcome="refused"') == 1


def test_keys_are_looked_at_here_and_passed_on() -> None:
    pool = Scripted(answer("x"))
    front = Fronted(pool, keys=("secret",))
    body = {"messages": HELLO}
    assert front.call("/v1/chat/completions", body)[0] == 401
    assert front.call("/metrics")[0] == 401
    assert pool.calls == pool.asked == []
    given = {"authorization": "Bearer secret", "cookie": "private", "origin": "http://localhost"}
    assert front.call("/v1/chat/completions", body, **given)[0] == 200
    assert dict(pool.calls[0].headers) == {b"authorization": b"Bearer secret"}
    assert front.call("/health")[0] == 503


def test_a_stream_is_steered_wherever_it_is() -> None:
    none, some = Whole("a", 404, b"{}"), Whole("b", 200, b'{"id": "chatcmpl-1"}')
    front = Fronted(Scripted(pages=[none, none]), Scripted(pages=[none, some]))
    assert front.call("/v1/mars/streams/chatcmpl-1", {"tau": 0.8}) == (200, some.body)
    asked = front.pools["model1"].asked[0]
    assert (asked.method, asked.path, json.loads(asked.body)) == (
        "POST",
        "/v1/mars/streams/chatcmpl-1",
        {"tau": 0.8},
    )
    assert Fronted(Scripted(pages=[none])).call("/v1/mars/streams/x", {"tau": 0.8})[0] == 404
    assert Fronted(Scripted()).call("/v1/mars/streams/x", {"tau": 0.8})[0] == 503


@pytest.mark.parametrize(("pages", "status"), [([200, 503], 200), ([503], 503), ([], 503)])
def test_health_is_that_each_bundle_has_a_replica(pages: list[int], status: int) -> None:
    pool = Scripted(pages=[Whole(str(i), code, b"{}") for i, code in enumerate(pages)])
    assert Fronted(Scripted(pages=[Whole("x", 200, b"{}")]), pool).call("/health")[0] == status


def test_models_are_listed_with_their_replicas() -> None:
    page = json.dumps({"data": [{"id": "tiny", "mars": {"block": 4}}, {"id": "tiny:p", "mars": {}}]}).encode()
    front = Fronted(Scripted(pages=[Whole("a", 200, page), Whole("b", 200, page)]))
    _, data = front.call("/v1/models")
    assert [entry["mars"]["replicas"] for entry in json.loads(data)["data"]] == [2, 2]
    assert json.loads(front.call("/v1/models/tiny:p")[1])["id"] == "tiny:p"
    assert front.call("/v1/models/tiny:q")[0] == 404


PAGE = """# HELP mars_forwards_total Forwards.
# TYPE mars_forwards_total counter
mars_forwards_total{model="tiny"} 3.0
# HELP up Whether.
# TYPE up gauge
up 1.0
"""


def test_metrics_of_all_replicas_are_one_page() -> None:
    front = Fronted(Scripted(answer("x"), pages=[Whole(n, 200, PAGE.encode()) for n in ('a"', "b")]))
    front.chat()
    status, data = front.call("/metrics")
    lines = data.decode().splitlines()
    assert status == 200 and len(lines) == len(set(lines))
    assert lines[:8] == [
        "# HELP mars_forwards_total Forwards.",
        "# TYPE mars_forwards_total counter",
        'mars_forwards_total{replica="a\\"",model="tiny"} 3.0',
        'mars_forwards_total{replica="b",model="tiny"} 3.0',
        "# HELP up Whether.",
        "# TYPE up gauge",
        'up{replica="a\\""} 1.0',
        'up{replica="b"} 1.0',
    ]
    assert 'mars_front_replicas{model="tiny"} 2' in lines
    assert 'mars_front_requests_total{model="tiny",outcome="answered"} 1.0' in lines
