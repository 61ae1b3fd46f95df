"""The acceptance rule, the loops, the choice of tokens and the planner: exactly as the files in
tests/conformance, which the C++ runtime must equal, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake import MASK, FakeBackend
from support.loops import NoText, decode
from support.makers import cases, maker

from mars_export.runtime.accept import accept
from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.sample import Penalties, choose, uniform
from mars_export.runtime.decode.sequence import Sequence

# Loaded before the tests replace LearnedCost.record.
PARTS = ("", "_loops", "_planning", "_exact", "_prefix", "_batcher", "_admission")
MAKERS = [maker(f"make{part}") for part in PARTS]


def row_of(index: int, wanted: dict[str, Any], **settings: Any) -> Sequence:
    config = GenerationConfig(
        max_new_tokens=wanted["max_new_tokens"],
        masks="full" if wanted["masks"] is None else wanted["masks"],
        eos_ids=tuple(wanted["eos_ids"]),
        **settings,
    )
    return Sequence(index, wanted["prompt"], config, (), NoText(lambda token: token == wanted["stop_token"]))


@pytest.mark.parametrize("case", cases("accept.json"), ids=lambda case: case["name"])
def test_accept_gives_exactly_the_conformance_file(case: dict[str, Any]) -> None:
    confidences = [float(c) for c in case["confidences"]]
    assert (
        accept(case["token_ids"], confidences, case["tau"], case["metric"], case["eos_ids"], case["limit"])
        == case["accepted"]
    )


def test_uniform_gives_exactly_the_conformance_file() -> None:
    for case in cases("uniform.json"):
        assert uniform(int(case["seed"]), case["position"]) == case["numerator"] / 2**53


@pytest.mark.parametrize("case", cases("loops.json"), ids=lambda case: case["name"])
def test_the_loop_gives_exactly_the_conformance_file(case: dict[str, Any]) -> None:
    predict = maker("make_loops").predict
    backend = FakeBackend(
        lambda known, masks: predict(list(known), masks), case["max_capacity"], case["max_slots"]
    )
    rows = [row_of(i, wanted, tau=wanted["taus"][0]) for i, wanted in enumerate(case["rows"])]
    loop = decode(backend, rows, case["block"], MASK, cache_block=case["cache_block"])
    runs: list[list[list[int]]] = [[] for _ in rows]
    for accepted in loop:
        for event in accepted:
            runs[event.seq].append(list(event.token_ids))
            row, taus = rows[event.seq], case["rows"][event.seq]["taus"]
            row.change(tau=taus[min(len(runs[event.seq]), len(taus) - 1)])
    for row, run, wanted in zip(rows, runs, case["rows"], strict=True):
        made = {
            "runs": run,
            "finish_reason": row.finish_reason,
            "forwards": row.stats.forwards,
            "prefill_forwards": row.stats.prefill_forwards,
        }
        assert made == wanted["expected"]


@pytest.mark.parametrize("case", cases("choices.json"))
def test_choices_are_those_of_the_conformance_file(case: dict[str, Any]) -> None:
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "metric", "seed")
    config = GenerationConfig(**{n: case[n] for n in names})
    penalties = Penalties(config).follow(case["seen"])
    token, confidence = choose(np.array(case["logits"], np.float32), config, penalties, case["position"])
    assert token == case["token"]
    assert confidence == pytest.approx(case["confidence"], abs=1e-5)


def test_the_conformance_files_are_what_their_script_writes() -> None:
    for module in MAKERS:
        for path, text in module.files().items():
            assert path.read_text(encoding="utf-8") == text, (
                f"run {module.__file__} and read the diff of {path.name}"
            )


def test_the_script_s_splitmix64_is_the_published_one() -> None:
    assert maker("make").splitmix64(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("case", cases("exact.json"), ids=lambda case: case["name"])
def test_exact_mode_is_that_of_the_conformance_file(case: dict[str, Any]) -> None:
    predict = maker("make_loops").predict
    limits = (case["max_capacity"], case["max_slots"], case["max_outputs"])
    for i, wanted in enumerate(case["rows"]):  # alone, so that each forward is this row's
        backend = FakeBackend(lambda known, masks: predict(list(known), masks), *limits)
        row = row_of(i, wanted)
        runs = [list(e.token_ids) for events in decode(backend, [row], case["block"], MASK) for e in events]
        expected = wanted["expected"]
        assert (runs, row.finish_reason) == (expected["runs"], expected["finish_reason"])
        assert (row.stats.draft_tokens, row.stats.accepted_draft_tokens) == (
            expected["draft_tokens"],
            expected["accepted_draft_tokens"],
        )
        slots = [step.slots for step in backend.steps[row.stats.prefill_forwards :]]
        assert slots == [sum(plan) for plan in expected["fed"]]
        masks = [int((step.input_ids == MASK).sum()) for step in backend.steps[row.stats.prefill_forwards :]]
        assert masks == [plan[2] for plan in expected["fed"]]
    backend = FakeBackend(lambda known, masks: predict(list(known), masks), *limits)
    together = [row_of(i, wanted) for i, wanted in enumerate(case["rows"])]
    for _ in decode(backend, together, case["block"], MASK):
        pass
    for row, wanted in zip(together, case["rows"], strict=True):
        answer = [token for run in wanted["expected"]["runs"] for token in run]
        assert row.tokens[len(wanted["prompt"]) :] == answer
