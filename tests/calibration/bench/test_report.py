"""The report of a whole benchmark on a tiny bundle: its JSON and tables, and how answers are judged.
Says nothing about speed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calibrations import WORDS as ALL
from support.calibrations import rows, shell
from support.paths import ROOT

from mars_export import CalibrationError
from mars_export.calibration.bench import SCHEMA, BenchRequest, bench

WORDS = ALL[:6]
COMPARED = {
    "setting", "tokens_per_second", "speed_up", "tokens_per_forward", "ttft", "itl", "tpot", "score",
    "score_interval", "same_answers", "draft_acceptance_rate", "requests_per_second", "answer_p95",
    "answers", "tokens", "unsteady", "cut_short", "forced",
}  # fmt: skip


def numbers(value: Any) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        return [n for part in value.values() for n in numbers(part)]
    if isinstance(value, list):
        return [n for part in value for n in numbers(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_report_and_its_json(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    bundle = request_for().bundle
    before = sorted((p.name, p.stat().st_mtime_ns) for p in bundle.iterdir())
    report = bench(request_for())
    assert sorted((p.name, p.stat().st_mtime_ns) for p in bundle.iterdir()) == before
    found = json.loads(json.dumps(report.to_dict()))
    assert found["schema"] == SCHEMA
    assert (found["task"], found["num_rows"], found["judges"], found["block"]) == (
        "words.jsonl",
        len(WORDS),
        "contains",
        6,
    )
    assert str(tmp_path) not in json.dumps(found)
    assert [(c["setting"]["batch"], c["setting"]["tau"]) for c in found["compared"]] == [
        (batch, tau) for batch in (1, 2) for tau in (1.0, None, 0.5)
    ]
    for line in found["compared"]:
        assert set(line) == COMPARED
        assert line["setting"]["masks"] == "auto"
        assert line["score_interval"][0] <= line["score"] <= line["score_interval"][1]
        assert line["score"] == 1.0
        assert line["answers"] == len(WORDS)
        assert line["speed_up"]["low"] <= line["speed_up"]["median"] <= line["speed_up"]["high"]
        assert line["ttft"]["count"] == 2 * len(WORDS), "of all rounds"
    assert [c["same_answers"] for c in found["compared"] if c["setting"]["tau"] in (1.0, None)] == [1.0] * 4
    for line in found["compared"]:
        is_exact = line["setting"]["tau"] is None
        assert (line["draft_acceptance_rate"] is not None) == is_exact
        assert not is_exact or 0 <= line["draft_acceptance_rate"] <= 1
    assert found["compared"][0]["tokens_per_forward"] == 1.0
    assert all(math.isfinite(n) and n >= 0 for n in numbers(found))
    assert all(n["speed_up"]["median"] == 1.0 for n in (found["compared"][0], found["compared"][3]))


def test_docs_describe_every_field(request_for: Callable[..., BenchRequest]) -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    report = bench(request_for(options=replace(request_for().options, batches=(1,), rounds=1)))
    missing = [name for name in {*report.to_dict(), *COMPARED} if f"`{name}`" not in page]
    assert not missing


def test_the_tables_fit_a_terminal(request_for: Callable[..., BenchRequest]) -> None:
    common = (
        request_for().bundle,
        "--task",
        request_for().task,
        "--threads",
        "1",
        "--rounds",
        "1",
        "--limit",
        "3",
    )
    common = (*common, "--tau", "0.5,0.9", "--batch", "1,2", "--masks", "auto,full")
    done = shell("bench", *common)
    assert done.exit_code == 0, done.output
    tables = [line for line in done.output.splitlines() if line.startswith(" ")]
    assert len(tables) > 3 * 2 * (1 + 2 + 2 * 2)
    assert max(map(len, map(str.rstrip, tables))) <= 80
    assert "TTFT" in done.output and "full" in done.output
    again = shell("bench", *common, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["schema"] == SCHEMA


def test_rows_without_answers_are_judged_by_agreement(
    request_for: Callable[..., BenchRequest], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(
        "".join(json.dumps({"prompt": word, "max_new_tokens": 8}) + "\n" for word in WORDS)
    )
    report = bench(request_for(options=replace(request_for().options, taus=(0.0,), batches=(2,), rounds=1)))
    assert report.judges == "agreement"
    plain, exact, fast = report.compared
    assert exact.score == exact.same_answers == 1.0
    assert plain.score == 1.0
    assert fast.score == fast.same_answers < 1.0


def test_prompts_that_do_not_fit_are_counted(
    request_for: Callable[..., BenchRequest], tmp_path: Path
) -> None:
    long, full = (
        rows(max_new_tokens=6).splitlines()[0].replace("hello", "a " * 600),
        rows(max_new_tokens=400).splitlines()[0].replace("hello", "a" * 480),
    )
    (tmp_path / "words.jsonl").write_text(rows(WORDS, max_new_tokens=6) + long + "\n" + full + "\n")
    report = bench(request_for(options=replace(request_for().options, batches=(1,), rounds=1)))
    assert report.too_long == (len(WORDS) + 1,)
    assert "1 rows were left out, their prompts are longer than the context" in report.notes
    assert report.compared[0].cut_short == 1 or report.compared[0].tokens < 400
    (tmp_path / "words.jsonl").write_text(long)
    with pytest.raises(CalibrationError, match="every prompt is longer than the context of 512"):
        bench(request_for())
