"""What Prometheus is told, held against what was done, and against what the dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.paths import ROOT
from support.stalling import paced

need("uvicorn", "serve")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from support.served import Serving, serving, talking, until  # noqa: E402

from mars_export import Session  # noqa: E402

COUNTED = (
    *("mars_prompt_tokens_total", "mars_generation_tokens_total", "mars_draft_tokens_total"),
    *("mars_accepted_draft_tokens_total", "mars_forced_tokens_total", "mars_forwards_total"),
    *("mars_prefix_cache_queries_total", "mars_prefix_cache_hits_total"),
)
TIMED = (
    *("mars_time_to_first_token_seconds", "mars_inter_token_latency_seconds"),
    *("mars_e2e_request_latency_seconds", "mars_request_queue_time_seconds"),
)
GAUGES = (
    *("mars_num_requests_running", "mars_num_requests_waiting", "mars_kv_cache_usage_ratio"),
    "mars_adaptive_level",
)


@pytest.fixture
def server(sessions: Sessions) -> Iterator[Serving]:
    tiny = sessions(MAIN)
    caching = Session(tiny.bundle, tiny.variant, tiny.backend, cache_bytes=1 << 20)
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
    until(lambda: server.metric("mars_requests_total", model="tiny", outcome="finished", level="") == 3)
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
    assert server.metric("mars_requests_total", model="", outcome="refused", level="") == 1
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


# --- deploy/grafana/mars-export.json asks for nothing that is not told ---

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/mars-export.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def told(sessions: Sessions) -> dict[str, set[str]]:
    """Names of what a server tells after one answer, each with its labels."""
    with serving({"tiny": sessions(MAIN)}) as server:
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
