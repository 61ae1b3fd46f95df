"""deploy/grafana/mars-export.json against a server: it asks for nothing that is not told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need
from support.paths import ROOT

need("uvicorn", "serve")

from support.served import serving  # noqa: E402

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
