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

from mars_export.runtime.bundle.open import open_bundle

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


def test_the_answers_follow_from_the_trace_by_the_rule(trace: dict[str, Any]) -> None:
    """Tokens, cursors and paddings of the file alone, as another runtime would come by them."""
    model = open_bundle(CONFORMANCE / trace["bundle"], full=True).manifest
    known = [list(prompt) for prompt in trace["prompts"]]
    final, pending = [0] * len(known), [len(prompt) for prompt in known]
    padded = 0
    for step in trace["steps"]:
        slots = len(step["input_ids"][0])
        for at, ids in enumerate(step["input_ids"]):
            row = step["rows_from"] + at
            assert step["kv_length"][at] == final[row]
            assert final[row] + slots <= trace["capacity"], "padding counts"
            fed = known[row][final[row] : final[row] + pending[row]]
            assert ids[: len(fed)] == fed
            masks = ids[len(fed) : len(fed) + model.block - 1]
            assert masks == [model.tokens.mask] * (model.block - 1)
            padded += slots - len(fed) - len(masks)
            wanted = step["output_index"][at]
            assert wanted == list(range(len(fed) - 1, len(fed) - 1 + model.block))
            run = []
            for token, confidence in zip(step["token_ids"][at], step["confidence"][at], strict=True):
                if run and np.float32(confidence) < trace["settings"]["tau"]:
                    break
                run.append(token)
            final[row], pending[row] = final[row] + len(fed), len(run)
            known[row] += run
    assert padded > 0, "rows of different widths: the trace shows padding"
    for row, prompt in enumerate(trace["prompts"]):
        made = known[row][len(prompt) :]
        assert trace["answers"][row][: len(made)] == made
        assert len(made) > 3
