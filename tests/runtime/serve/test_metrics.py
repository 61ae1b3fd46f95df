"""What Prometheus is told, held against what was done, and against what the dashboard asks for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.paths import ROOT
from support.stalling import paced

need("uvicorn", "serve")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from support.served import Serving, profiled, serving, talking, until  # noqa: E402

from mars_export import GenerationConfig, Session  # noqa: E402
from mars_export.runtime.decode.stats import Stats  # noqa: E402
from mars_export.runtime.serve import metrics  # noqa: E402
from mars_export.runtime.serve.metrics import AcceptanceMonitor  # noqa: E402
from mars_export.runtime.serve.models import Models  # noqa: E402
from mars_export.runtime.serve.options import ServeOptions  # noqa: E402
from mars_export.runtime.serve.responses.admission import Admitted  # noqa: E402

COUNTED = (
    *("mars_prompt_tokens_total", "mars_generation_tokens_total", "mars_draft_tokens_total"),
    *("mars_accepted_draft_tokens_total", "mars_forced_tokens_total", "mars_forwards_total"),
    *("mars_prefix_cache_queries_total", "mars_prefix_cache_hits_total"),
)
TIMED = (
    *("mars_time_to_first_token_seconds", "mars_inter_token_latency_seconds"),
    *("mars_e2e_request_latency_seconds", "mars_request_queue_time_seconds"),
)
GAUGES = ("mars_num_requests_running", "mars_num_requests_waiting", "mars_kv_cache_usage_ratio")


@pytest.fixture
def server(sessions: Sessions) -> Iterator[Serving]:
    tiny = sessions(MAIN)
    caching = Session(tiny.bundle, tiny.variant, tiny.backend, tiny.text, cache_bytes=1 << 20)
    with serving({"tiny": caching, "idle": tiny}) as running:
        yield running


def samples(server: Serving) -> dict[tuple[str, str], float]:
    """By name and model; buckets left out."""
    families = text_string_to_metric_families(server.call("/metrics").data.decode())
    return {
        (sample.name, sample.labels.get("model", "")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_every_name_is_there_from_the_start(server: Serving) -> None:
    found = samples(server)
    for model in ("tiny", "idle"):
        for name in (*GAUGES, *COUNTED, *(f"{name}_{part}" for name in TIMED for part in ("sum", "count"))):
            assert (name, model) in found, name
    assert not [name for name, _ in found if name.endswith("_created")]
    assert server.call("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_counters_count_what_was_done(server: Serving) -> None:
    before = samples(server)
    long = [{"role": "user", "content": "many words " * 30}]  # more than one piece of a prompt
    answers = [
        server.chat(messages=long, max_tokens=10),
        server.chat(messages=long, max_tokens=10, stream=True),
        server.chat(messages=long, max_tokens=7, n=2),
    ]
    until(lambda: server.metric("mars_requests_total", model="tiny", outcome="finished") == 3)
    assert server.chat(max_tokens=0).status == 400
    after = samples(server)
    more = {
        name: after[name, model] - before.get((name, model), 0) for name, model in after if model == "tiny"
    }
    usage = [answer.json["usage"] for answer in (answers[0], answers[2])]
    assert more["mars_generation_tokens_total"] == 10 + 10 + 14
    assert more["mars_prompt_tokens_total"] == 3 * usage[0]["prompt_tokens"]
    timings = [answers[0].json["timings"], answers[1].chunks[-2]["timings"], answers[2].json["timings"]]
    assert more["mars_forwards_total"] == sum(timing["forwards"] for timing in timings)
    verified = [u["completion_tokens_details"]["accepted_prediction_tokens"] for u in usage]
    assert more["mars_accepted_draft_tokens_total"] == 2 * verified[0] + verified[1]
    assert more["mars_draft_tokens_total"] >= more["mars_accepted_draft_tokens_total"]
    assert more["mars_time_to_first_token_seconds_count"] == 4
    assert more["mars_request_queue_time_seconds_count"] == 4
    assert more["mars_e2e_request_latency_seconds_count"] == 3
    assert 0 < more["mars_inter_token_latency_seconds_count"] < 10 + 10 + 14
    assert more["mars_prefix_cache_queries_total"] == 4 * usage[0]["prompt_tokens"]
    assert timings[1]["cached_n"] > 0 == timings[0]["cached_n"]
    assert more["mars_prefix_cache_hits_total"] >= sum(timing["cached_n"] for timing in timings)
    assert server.metric("mars_requests_total", model="", outcome="refused") == 1
    assert all(after[name, "idle"] == before[name, "idle"] for name, model in before if model == "idle")


def test_gauges_show_what_is_so_now(sessions: Sessions) -> None:
    session, pace = paced(sessions(MAIN))
    with serving({"tiny": session}) as server:
        pace.hold()
        pace.let(2)
        with talking(server, max_tokens=20, tau=1.0) as answer:
            until(lambda: pace.is_waiting)
            found = samples(server)
            assert found["mars_num_requests_running", "tiny"] == 1
            assert found["mars_num_requests_waiting", "tiny"] == 0
            assert 0 < found["mars_kv_cache_usage_ratio", "tiny"] < 0.1
            pace.open()
            answer.read()
        until(lambda: samples(server)["mars_num_requests_running", "tiny"] == 0)
        assert samples(server)["mars_kv_cache_usage_ratio", "tiny"] == 0


def test_times_begin_at_the_arrival(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a model and compiling a grammar are parts of them."""
    take = Models.take

    async def late(*arguments: Any) -> Any:
        await asyncio.sleep(0.6)
        return await take(*arguments)

    monkeypatch.setattr(Models, "take", late)
    with serving({"tiny": sessions(MAIN)}) as server:
        assert server.chat(max_tokens=2).json["timings"]["queue_ms"] >= 600
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
            until(lambda name=name: server.metric(f"mars_{name}_seconds_sum", model="tiny") >= 0.6)


# --- answers with a profile, beside what its calibration measured ---


def expecting(session: Session, tokens_per_forward: Any) -> Session:
    """The session with a profile `task` whose evidence has this number."""
    bundle = profiled(session, {"task": 0.3}, {"tokens_per_forward": tokens_per_forward})
    return Session(bundle, session.variant, session.backend, session.text)


def test_a_profile_whose_answers_gain_little_warns_once(
    sessions: Sessions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PRIOR", 10.0)
    with serving({"tiny": expecting(sessions(MAIN), 20.0)}) as server:

        def ratio() -> float:
            return server.metric("mars_acceptance_ratio", model="tiny", profile="task")

        assert ratio() == 1
        for settings in ({}, {"tau": 0.3}, {"temperature": 1, "model": "tiny:task"}):
            for _ in range(2):  # nothing to compare with
                assert server.chat(max_tokens=20, **settings).status == 200
        until(lambda: server.metric("mars_requests_total", model="tiny", outcome="finished") == 6)
        assert ratio() == 1 and not caplog.records
        for _ in range(10):
            assert server.chat(max_tokens=20, model="tiny:task").status == 200
        until(lambda: 0 < ratio() < 0.5)
    [warning] = [r for r in caplog.records if r.name == "mars_export.serve" and r.levelname == "WARNING"]
    words = r"tiny: profile task gives \d+\.\d\d tokens per forward, .* gave 20.00"
    assert re.search(words, warning.getMessage())


@pytest.mark.parametrize("evidence", [1.1, 0, -3, "many", None, True, [2], 1e400])
def test_evidence_without_a_gain_is_compared_with_nothing(evidence: Any, sessions: Sessions) -> None:
    with serving({"tiny": expecting(sessions(MAIN), evidence)}) as server:
        assert server.chat(model="tiny:task", max_tokens=4).status == 200
        assert b"mars_acceptance_ratio{" not in server.call("/metrics").data


def test_one_long_answer_decides_nothing_and_a_recovery_warns_again(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    session = expecting(sessions(MAIN), 3.0)
    caplog.set_level(logging.INFO, "mars_export.serve")
    monitor = AcceptanceMonitor(Models({"tiny": session}, ServeOptions()))
    config = GenerationConfig(tau=0.3)

    def answer(tokens: int, forwards: int) -> float:
        request: Any = SimpleNamespace(stats=Stats(tokens=tokens, forwards=forwards))
        model: Any = SimpleNamespace(name="tiny")
        monitor.ended(Admitted(None, model, config, "task", [request]))  # type: ignore[arg-type]
        [(_, _, ratio)] = monitor.ratios()
        return ratio

    assert answer(100_000, 100_000) > 0.9  # one token a forward
    assert answer(0, 0) > 0.9  # refused before its first forward
    levels = []
    for gain in (1, 3, 1):
        for _ in range(200):
            answer(100 * gain, 100)
        levels.append([record.levelname for record in caplog.records])
    assert levels == [["WARNING"], ["WARNING", "INFO"], ["WARNING", "INFO", "WARNING"]]


# --- deploy/grafana/mars-export.json asks for nothing that is not told ---

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/mars-export.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def told(sessions: Sessions) -> dict[str, set[str]]:
    """Names of what a server tells after one answer, each with its labels."""
    with serving({"tiny": expecting(sessions(MAIN), 3.0)}) as server:
        assert server.chat(max_tokens=2).status == 200
        text = server.call("/metrics").data.decode()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_every_metric_and_label_is_told(told: dict[str, set[str]]) -> None:
    assert len(QUERIES) > 20
    asked: set[str] = set()
    for query in QUERIES:
        names = re.findall(r"\bmars_\w+", query)
        assert names, query
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", query))
        labels |= {
            word for words in re.findall(r"by \(([^)]*)\)", query) for word in re.split(r",\s*", words)
        }
        for name in names:
            assert name in told, query
            assert labels <= told[name], query
        asked |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    own = {re.sub(r"_(bucket|sum|count)$", "", n) for n in told if n.startswith("mars_")}
    own = {name for name in own if not name.endswith("_created")}
    assert own == asked, "what is told and shown nowhere"


def test_the_model_s_list_is_told(told: dict[str, set[str]]) -> None:
    [model] = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "model"]
    name, label = re.findall(r"label_values\((\w+), (\w+)\)", model["query"]["query"])[0]
    assert label in told[name]
