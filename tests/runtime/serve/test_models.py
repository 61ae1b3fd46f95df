"""Several bundles in one server: opened when they are named, closed when another needs the place."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Named, Sessions
from support.manifests import ENGINE
from support.missing import need

need("uvicorn", "serve")

from support.served import HELLO, Serving, profiled, serving, talking, until  # noqa: E402

from mars_export import GenerationConfig, Limits, Session, SessionError  # noqa: E402
from mars_export.runtime.bundle.variant_info import Extent  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402
from mars_export.runtime.serve.loaded_model import LoadedModel  # noqa: E402
from mars_export.runtime.serve.models import LazyModel  # noqa: E402

OTHER = "qwen2"


class Shelf:
    """Lazy models, and how many of their sessions exist."""

    def __init__(self, bundles: Named) -> None:
        self._bundles, self.lives = bundles, weakref.WeakSet[Session]()
        self.most, self.opened, self.error = 0, [], None

    def unopened(self, name: str) -> LazyModel:
        session = Session.open(self._bundles(name), threads=1, cache_bytes=0)

        def opened() -> Session:
            if self.error is not None:
                raise self.error
            fresh = Session.open(self._bundles(name), threads=1, cache_bytes=0)
            self.lives.add(fresh)
            self.opened.append(name)
            self.most = max(self.most, len(self.lives))
            return fresh

        return LazyModel(session.bundle, session.variant, opened)

    @property
    def both(self) -> dict[str, LazyModel]:
        return {"a": self.unopened(MAIN), "b": self.unopened(OTHER)}


@pytest.fixture
def shelf(bundles: Named) -> Iterator[Shelf]:
    yield Shelf(bundles)
    gc.collect()


def answer(server: Serving, model: str, **fields: Any) -> Any:
    return server.call("/v1/completions", {"model": model, "prompt": [5, 6, 7], "max_tokens": 6} | fields)


def states(server: Serving) -> dict[str, str]:
    return {m["id"]: m["mars"]["state"] for m in server.call("/v1/models").json["data"]}


def test_a_bundle_is_opened_at_its_first_request(shelf: Shelf) -> None:
    with serving(shelf.both) as server:
        assert server.call("/health/ready").status == 200
        assert states(server) == {"a": "unloaded", "b": "unloaded"}
        listed = server.call("/v1/models/b").json["mars"]
        assert listed["structured"] and listed["json_schema"] and listed["tools"] and listed["logprobs"]
        assert answer(server, "b").json["model"] == "b"
        assert states(server) == {"a": "unloaded", "b": "loaded"}
        assert server.call("/v1/models/b").json["mars"] == listed | {"state": "loaded"}
        assert server.call("/v1/messages/count_tokens", {"messages": HELLO}).status == 200
        assert states(server) == {"a": "loaded", "b": "loaded"}
        assert [server.metric("mars_model_loaded", model=name) for name in "ab"] == [1, 1]
        until(lambda: server.metric("mars_generation_tokens_total", model="b") == 6)
        assert server.metric("mars_generation_tokens_total", model="a") == 0
        unknown = answer(server, "c")
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
        assert "there are: a, b" in unknown.json["error"]["message"]


def test_both_are_asked_at_once_and_one_is_open(shelf: Shelf) -> None:
    with serving(shelf.both) as server:
        wanted = {name: answer(server, name).json["choices"] for name in "ab"}
    shelf.opened.clear()
    del server
    gc.collect()
    shelf.most = 0
    wrong: list[Any] = []
    with serving(shelf.both, ServeOptions(max_models=1)) as server:

        def client(first: int) -> None:
            for number in range(first, first + 3):
                name = "ab"[number % 2]
                had = answer(server, name)
                if had.status != 200 or had.json["choices"] != wanted[name]:
                    wrong.append((name, had.status, had.data))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert sorted(states(server).values()) == ["loaded", "unloaded"]
        assert {MAIN, OTHER} <= set(shelf.opened)
        assert shelf.most == 1, "the closed one is freed before the other is opened"
        assert sum(server.metric("mars_model_loaded", model=name) for name in "ab") == 1


def test_a_model_in_use_is_not_closed(shelf: Shelf) -> None:
    options = ServeOptions(max_models=1, queue_timeout=0.1)
    with serving(shelf.both, options) as server:
        until(lambda: answer(server, "a").status == 200)  # opening it may take longer than a request waits
        long = {"model": "a", "tau": 1.0, "ignore_eos": True, "max_tokens": 450}
        with talking(server, **long) as stream:
            assert stream.status == 200
            refused = answer(server, "b")
            assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
            lines = [line for line in stream.read().decode().split("\n\n") if line]
            assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        until(lambda: answer(server, "b").status == 200)
        assert states(server) == {"a": "unloaded", "b": "loaded"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SessionError("its graph is broken"), "its graph is broken"),
        (
            PermissionError(13, "Permission denied", "/prefixes"),
            "PermissionError: [Errno 13] Permission denied",
        ),
    ],
)
def test_a_bundle_that_cannot_be_opened_leaves_the_others(
    error: Exception, said: str, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), serving(shelf.both) as server:
        assert answer(server, "a").status == 200
        shelf.error = error
        failed = answer(server, "b")
        assert (failed.status, failed.json["error"]["code"]) == (503, "failed")
        assert failed.json["error"]["message"] == "b cannot be opened; see the server's log"
        assert f"b cannot be opened: {said}" in caplog.text
        assert states(server) == {"a": "loaded", "b": "failed"}
        assert (server.call("/health").status, answer(server, "a").status) == (200, 200)
        shelf.error = None
        assert answer(server, "b").status == 200, "it is tried again"


def test_bytes_of_open_models_are_bounded(shelf: Shelf) -> None:
    both = shelf.both
    weights = [e.size for e in both["a"].bundle.manifest.files if e.path == both["a"].variant.weights]
    with serving(both, ServeOptions(max_model_bytes=weights[0] + 1)) as server:
        for name in "aba":
            assert answer(server, name).status == 200
            assert [model for model, state in states(server).items() if state == "loaded"] == [name]


@pytest.mark.parametrize("at_first_step", [False, True])
def test_short_memory_closes_another(at_first_step: bool, shelf: Shelf) -> None:
    """When the other is opened, or in its first step."""
    both, others = shelf.both, []
    first_open = both["b"].open

    def no_room(*_: int) -> Any:
        raise SessionError("not enough memory", code="out_of_memory")

    def needs_room() -> Session:
        others.append(len(shelf.lives))
        if others[-1] and not at_first_step:
            no_room()
        session = first_open()
        if others[-1]:
            session.backend.new_cache = no_room
        return session

    both["b"] = LazyModel(both["b"].bundle, both["b"].variant, needs_room)
    with serving(both) as server:
        assert [answer(server, name).status for name in "ab"] == [200, 200]
        assert states(server) == {"a": "unloaded", "b": "loaded"}
    assert others == [1, 0], "the session whose first step failed is freed before the next attempt"


def test_a_request_that_gives_up_does_not_stop_the_closing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes = LoadedModel.close

    def slow(model: LoadedModel, drain: float) -> None:
        time.sleep(0.8)
        closes(model, drain)

    with serving(shelf.both, ServeOptions(max_models=1, queue_timeout=0.2)) as server:
        until(lambda: answer(server, "a").status == 200)
        shelf.most = 0
        monkeypatch.setattr(LoadedModel, "close", slow)
        assert answer(server, "b").status == 429
        until(lambda: answer(server, "b").status == 200)
        assert shelf.most == 1, "the closed one is freed before the other is opened"
        monkeypatch.undo()


def test_a_request_that_gives_up_does_not_stop_the_opening(shelf: Shelf) -> None:
    both = shelf.both

    def slow() -> Session:
        time.sleep(0.6)
        return opens()

    opens = both["b"].open
    both["b"] = LazyModel(both["b"].bundle, both["b"].variant, slow)
    with serving(both, ServeOptions(queue_timeout=0.2)) as server:
        assert answer(server, "b").status == 429
        until(lambda: states(server)["b"] == "loaded")
        until(lambda: answer(server, "b").status == 200)
        assert shelf.opened == [OTHER], "once"


def test_a_server_that_closes_keeps_no_model_that_is_being_opened(shelf: Shelf) -> None:
    both = shelf.both
    entered, gate = threading.Event(), threading.Event()

    def slow() -> Session:
        entered.set()
        assert gate.wait(30)
        return opens()

    opens = both["b"].open
    both["b"] = LazyModel(both["b"].bundle, both["b"].variant, slow)
    with serving(both) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, server, "b")
        assert entered.wait(30)
        server.door.service.models.close(0)
        gate.set()
        assert (asked.result().status, asked.result().json["error"]["code"]) == (503, "closing")
        assert states(server)["b"] == "unloaded" and shelf.opened == [OTHER]


# --- how many requests run at once: of an engine as many as its rows, unless the operator says a number ---


def engine(session: Session, rows: int) -> Session:
    """The same graph, said to be an engine of so many rows."""
    ranges = tuple(
        replace(each, batch=Extent(1, 1, rows), outputs=Extent(1, 4, 64)) for each in ENGINE.ranges
    )
    variant = replace(
        session.variant, backend="tensorrt", capacity=512, engine=replace(ENGINE, ranges=ranges)
    )
    made = Session(session.bundle, variant, session.backend, session.text)
    made.cost = session.cost
    return made


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (2, ServeOptions(fits_rows=True), 2),
        (16, ServeOptions(fits_rows=True), 8),
        (2, ServeOptions(Limits(max_rows=3)), 3),
        (None, ServeOptions(fits_rows=True), 8),
    ],
)
def test_rows_of_an_engine(
    rows: int | None,
    options: ServeOptions,
    expected: int,
    sessions: Sessions,
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = sessions("llama") if rows is None else engine(sessions("llama"), rows)
    model = LoadedModel("m", session, options)
    with caplog.at_level(logging.INFO, "mars_export.serve"):
        model.warm()
    assert model.fault is None and model.batcher is not None
    model.batcher.close()
    assert model.batcher.limits == replace(options.limits, max_rows=expected)
    said = [
        record.getMessage() for record in caplog.records if "the rows of its engine" in record.getMessage()
    ]
    assert len(said) == (1 if rows == expected == 2 else 0)


@pytest.mark.parametrize("entries", [8 * 512, 8 * 768])
def test_requests_without_max_tokens_run_side_by_side(entries: int, sessions: Sessions) -> None:
    session = sessions("llama")
    limits = Limits(max_rows=8, kv_bytes=entries * session.kv_budget(1, None).entry_bytes)
    model = LoadedModel("m", session, ServeOptions(limits))
    model.warm()
    with model.running() as batcher:
        config = GenerationConfig(max_new_tokens=model.default_tokens, eos_ids=())
        assert config.max_new_tokens >= 100
        requests = [batcher.submit([5, 6, 7, n], config) for n in range(8)]
        until(lambda: batcher.num_running == 8)
        for request in requests:
            request.cancel()


def test_a_profile_is_a_model_name(sessions: Sessions) -> None:
    session = sessions(MAIN)
    bundle = profiled(session, {"near@0.01": 0.9, "far@0.02": 0.3})
    with serving({"tiny": Session(bundle, session.variant, session.backend, session.text)}) as server:
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
