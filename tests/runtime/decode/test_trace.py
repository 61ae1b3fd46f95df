"""tests/conformance/trace.json, the steps of a tiny bundle as tensors: what ONNX Runtime answers, and what a
session feeds. docs/format.md tells others to check their runtime by it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.makers import maker
from support.paths import CONFORMANCE

MAKER = maker("make_trace")


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFORMANCE / "trace.json").read_text(encoding="utf-8"))
    return found


def test_the_graph_answers_what_the_trace_says(trace: dict[str, Any]) -> None:
    answered = MAKER.replay(trace["steps"])
    assert len(answered) == len(trace["steps"]) == 5
    for found, said in zip(answered, trace["steps"], strict=True):
        assert found["token_ids"] == said["token_ids"]
        np.testing.assert_allclose(found["confidence"], said["confidence"], atol=trace["tolerance"])
        assert found["written"].keys() == said["written"].keys() == {"0.key", "0.value"}
        for name, entries in said["written"].items():
            np.testing.assert_allclose(found["written"][name], entries, atol=trace["tolerance"])


def test_a_session_feeds_what_the_trace_says(trace: dict[str, Any]) -> None:
    steps, answers = MAKER.recorded()
    for found, said in zip(steps, trace["steps"], strict=True):
        assert found == {name: said[name] for name in ("rows_from", *MAKER.FED)}
    assert answers == trace["answers"]
