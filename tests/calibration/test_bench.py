"""A whole benchmark on a tiny bundle, from the shell: report, tables, JSON, interruption and bad input. Says
nothing about speed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.missing import need
from support.paths import ROOT
from support.tiny import Named
from typer.testing import CliRunner

from mars_export.calibration.bench import bench as bench_module
from mars_export.calibration.bench.bench import BenchRequest, bench, estimate
from mars_export.calibration.bench.report import SCHEMA
from mars_export.calibration.bench.settings import BenchOptions
from mars_export.cli import app
from mars_export.runtime import BundleError, CalibrationError, MarsError
from mars_export.runtime.bundle.open import open_bundle, write_manifest

WORDS = ("hello", "the cat", "one", "in the end", "an apple", "er")
OPTIONS = BenchOptions(taus=(0.5,), batches=(1, 2), commits=("cursor", "block"), rounds=2, cursor=32)
COMPARED = {
    "setting", "tokens_per_second", "speed_up", "tokens_per_forward", "ttft", "itl", "tpot", "score",
    "score_interval", "same_answers", "proposals_held", "peak_memory",
    "answers", "tokens", "unsteady", "cut_short", "forced",
}  # fmt: skip


def rows(**fields: Any) -> str:
    """Any answer is right, unless `fields` say otherwise."""
    common = {"answer": "", "metric": "contains", "max_new_tokens": 6} | fields
    return "".join(
        json.dumps({"messages": [{"role": "user", "content": word}], **common}) + "\n" for word in WORDS
    )


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds: only the picture's own test does it."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(
            "mars_export.calibration.bench.figure.save_png", lambda report, path: path.write_bytes(b"")
        )


@pytest.fixture
def request_for(bundles: Named, tmp_path: Path) -> Callable[..., BenchRequest]:
    (tmp_path / "words.jsonl").write_text(rows())
    wanted = BenchRequest(
        bundles("qwen2"), str(tmp_path / "words.jsonl"), tmp_path / "out", threads=1, options=OPTIONS
    )
    return lambda **changes: replace(wanted, **changes)


def shell(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)])


def states(folder: Path) -> list[list[str]]:
    """The lines of every state in a folder."""
    return [path.read_text().splitlines() for path in sorted(folder.glob("state-*.jsonl"))]


def numbers(value: Any) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        return [n for part in value.values() for n in numbers(part)]
    if isinstance(value, list):
        return [n for part in value for n in numbers(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_report_and_its_json(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    before = sorted(
        (p.name, p.stat().st_mtime_ns) for p in request_for().bundle.iterdir() if p.name != ".verified.json"
    )
    report = bench(request_for())
    assert (
        sorted(
            (p.name, p.stat().st_mtime_ns)
            for p in request_for().bundle.iterdir()
            if p.name != ".verified.json"
        )
        == before
    )
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert found == json.loads(json.dumps(report.to_dict()))
    assert found["schema"] == SCHEMA
    assert (found["task"], found["num_rows"], found["judges"], found["block"]) == (
        "words.jsonl",
        len(WORDS),
        "contains",
        6,
    )
    assert str(tmp_path) not in json.dumps(found)
    assert [c["batch"] for c in found["curves"]] == [1, 2]
    assert [p["slots"] for p in found["curves"][0]["points"]] == [1, 2, 3, 4, 6, 8, 11]
    assert [(e["batch"], e["window"]) for e in found["break_even"]] == [(1, 6), (2, 6)]
    assert [
        (c["setting"]["batch"], c["setting"]["tau"], c["setting"]["commit"]) for c in found["compared"]
    ] == [
        (batch, *rest)
        for batch in (1, 2)
        for rest in ((1.0, "cursor"), (None, "cursor"), (0.5, "cursor"), (0.5, "block 32"))
    ]
    for line in found["compared"]:
        assert set(line) == COMPARED
        assert line["setting"]["window"] == "auto"
        assert line["score_interval"][0] <= line["score"] <= line["score_interval"][1]
        assert line["score"] == 1.0
        assert line["answers"] == len(WORDS)
        assert line["speed_up"]["low"] <= line["speed_up"]["median"] <= line["speed_up"]["high"]
        assert line["ttft"]["count"] == 2 * len(WORDS), "of all rounds"
    assert [c["same_answers"] for c in found["compared"] if c["setting"]["tau"] in (1.0, None)] == [1.0] * 4
    for line in found["compared"]:
        is_exact = line["setting"]["tau"] is None
        assert (line["proposals_held"] is not None) == is_exact
        assert not is_exact or 0 <= line["proposals_held"] <= 1
    assert found["compared"][0]["tokens_per_forward"] == 1.0
    assert all(math.isfinite(n) and n >= 0 for n in numbers(found))
    assert all(n["speed_up"]["median"] == 1.0 for n in (found["compared"][0], found["compared"][4]))


def test_docs_describe_every_field(request_for: Callable[..., BenchRequest]) -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    report = bench(request_for(options=replace(OPTIONS, batches=(1,), commits=("cursor",), rounds=1)))
    missing = [
        name for name in {*report.to_dict(), *COMPARED, "relative", "milliseconds"} if f"`{name}`" not in page
    ]
    assert not missing


def test_the_tables_fit_a_terminal(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
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
        "-o",
        tmp_path / "out",
    )
    done = shell(
        *common, "--tau", "0.5,0.9", "--batch", "1,2", "--window", "auto,full", "--commit", "cursor,block"
    )
    assert done.exit_code == 0, done.output
    tables = [line for line in done.output.splitlines() if line.startswith(" ")]
    assert len(tables) > 2 * (1 + 2 * (1 + 4 * 2))
    assert max(map(len, map(str.rstrip, tables))) <= 80
    assert (
        "tokens/forward this device gains nothing" in done.output
        or "no number of tokens/forward" in done.output
    )
    assert "TTFT" in done.output and "block 32" in done.output
    again = shell(
        *common,
        "--tau",
        "0.5,0.9",
        "--batch",
        "1,2",
        "--window",
        "auto,full",
        "--commit",
        "cursor,block",
        "--resume",
        "--json",
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["schema"] == SCHEMA


def test_the_picture(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    need("matplotlib", "calibrate")
    report = bench(
        request_for(options=replace(OPTIONS, batches=(1,), windows=("auto", 2), rounds=1, limit=2))
    )
    assert report.no_picture is None
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_everything_but_the_picture(
    request_for: Callable[..., BenchRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise CalibrationError("the report needs matplotlib; pip install 'mars-export[calibrate]'")

    monkeypatch.setattr(bench_module, "require_matplotlib", absent)
    report = bench(request_for(options=replace(OPTIONS, batches=(1,), rounds=1, limit=2)))
    assert (
        "note: no picture: the report needs matplotlib; pip install 'mars-export[calibrate]'" in report.facts
    )
    assert not (tmp_path / "out" / "bench.png").exists()
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["notes"] == report.notes


def test_an_interrupted_run_goes_on(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    def stop_later(phase: str, done: int, _: int) -> None:
        if phase == "answers" and done >= 2 * len(WORDS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(request_for(), stop_later)
    assert not (tmp_path / "out" / "bench.json").exists()
    with pytest.raises(
        CalibrationError, match="finished pieces of this work are there; --resume uses them, --force"
    ):
        bench(request_for())
    with pytest.raises(CalibrationError, match=r"a state of other work is there \(another settings\)"):
        bench(request_for(resume=True, options=replace(OPTIONS, taus=(0.9,))))
    with pytest.raises(CalibrationError, match=r"another data"):
        bench(request_for(resume=True, options=replace(OPTIONS, limit=2)))
    work: dict[str, list[int]] = {}
    bench(request_for(resume=True), lambda phase, done, total: work.setdefault(phase, []).append(done))
    (state,) = states(tmp_path / "out")
    assert len(state) == 1 + 6 + 2 * len(OPTIONS.settings)
    assert bench(request_for(force=True, options=replace(OPTIONS, batches=(1,), rounds=1))).num_rows == len(
        WORDS
    )


def test_a_second_bundle_just_works(
    request_for: Callable[..., BenchRequest], bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(OPTIONS, batches=(1,), commits=("cursor",), rounds=1, limit=2)
    first = request_for(options=few)
    second = replace(first, bundle=bundles("llama"))
    for request in (first, second):
        bench(request)
    assert len(states(tmp_path / "out")) == 2
    with pytest.raises(CalibrationError, match="--resume uses them"):
        bench(first)
    monkeypatch.chdir(tmp_path)
    folders = [replace(request, output=None).folder for request in (first, second)]
    assert len(set(folders)) == 2
    assert all(str(folder).startswith("bench-words-") for folder in folders)


def test_few_rows_have_a_wide_interval(request_for: Callable[..., BenchRequest]) -> None:
    few = replace(OPTIONS, batches=(1,), commits=("cursor",), rounds=1)
    report = bench(request_for(options=few))
    low, high = report.compared[0].score_interval
    assert (low, high) == (pytest.approx(0.6097, abs=1e-3), 1.0)
    assert "100 (61-100)" in report.speed_table[1]
    assert [line[0] for line in report.speed_table[2:]] == ["1", "1"]
    assert [line[1] for line in report.speed_table] == ["tau", "1", "exact", "0.5"]
    assert "100 (61-100) against 100 (61-100) %" in report.headline or "no setting" in report.headline


def test_ctrl_c_from_the_shell(
    request_for: Callable[..., BenchRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mars_export.calibration.bench.bench.serve", stopped)
    done = shell(
        request_for().bundle,
        "--task",
        request_for().task,
        "-o",
        tmp_path / "out",
        "--threads",
        "1",
        "--rounds",
        "1",
    )
    assert done.exit_code == 130
    assert "--resume goes on" in done.output
    (state,) = states(tmp_path / "out")
    assert len(state) == 1 + 3


def test_rows_without_answers_are_judged_by_agreement(
    request_for: Callable[..., BenchRequest], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(
        "".join(json.dumps({"prompt": word, "max_new_tokens": 8}) + "\n" for word in WORDS)
    )
    report = bench(
        request_for(options=replace(OPTIONS, taus=(0.0,), batches=(2,), commits=("cursor",), rounds=1))
    )
    assert report.judges == "agreement"
    plain, exact, fast = report.compared
    assert exact.score == exact.same_answers == 1.0
    assert plain.score == 1.0
    assert fast.score == fast.same_answers < 1.0


def test_prompts_that_do_not_fit_are_counted(
    request_for: Callable[..., BenchRequest], tmp_path: Path
) -> None:
    long, full = (
        rows().splitlines()[0].replace("hello", "a " * 600),
        rows(max_new_tokens=400).splitlines()[0].replace("hello", "a" * 480),
    )
    (tmp_path / "words.jsonl").write_text(rows() + long + "\n" + full + "\n")
    report = bench(request_for(options=replace(OPTIONS, batches=(1,), rounds=1)))
    assert report.too_long == (len(WORDS) + 1,)
    assert "1 rows were left out, their prompts are longer than the context" in report.notes
    assert report.compared[0].cut_short == 1 or report.compared[0].tokens < 400
    (tmp_path / "words.jsonl").write_text(long)
    with pytest.raises(CalibrationError, match="every prompt is longer than the context of 512"):
        bench(request_for(force=True))


def test_a_bundle_without_a_tokenizer(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    bundle = shutil.copytree(request_for().bundle, tmp_path / "mute.bundle")
    write_manifest(bundle, replace(open_bundle(bundle).manifest, text=None))
    with pytest.raises(CalibrationError, match="no tokenizer, and tasks are text"):
        bench(request_for(bundle=bundle))
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_ours(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CalibrationError, match="holds other files and no benchmark"):
        bench(request_for(output=tmp_path / "mine"))
    with pytest.raises(CalibrationError, match="a file is where the report's folder should be"):
        bench(request_for(output=tmp_path / "words.jsonl"))
    with pytest.raises(CalibrationError, match="the report's folder cannot be made"):
        bench(request_for(output=tmp_path / "words.jsonl" / "deeper"))
    bench(
        request_for(
            output=tmp_path / "mine",
            force=True,
            options=replace(OPTIONS, batches=(1,), commits=("cursor",), rounds=1, limit=1),
        )
    )
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_estimate_writes_nothing(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    found = estimate(request_for())
    assert (found.num_rows, found.num_settings) == (len(WORDS), len(OPTIONS.settings))
    assert found.seconds > found.step_seconds > 0
    assert not (tmp_path / "out").exists()
    done = shell(
        request_for().bundle,
        "--task",
        request_for().task,
        "-o",
        tmp_path / "out",
        "--threads",
        "1",
        "--dry-run",
        "--json",
    )
    assert json.loads(done.stdout)["num_rows"] == len(WORDS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--task", "sums"], CalibrationError, "sums: cannot be read.*arithmetic or assistant"),
        (["--batch", "0"], CalibrationError, "batch must be 1 or more, not 0"),
        (["--batch", "two"], MarsError, "--batch must be whole numbers"),
        (["--tau", "nan"], CalibrationError, "tau must be a number of 0 or more, not nan"),
        (["--tau", "fast"], MarsError, "--tau must be numbers"),
        (["--tau", ",", "--no-exact"], CalibrationError, "give at least one tau"),
        (["--window", "wide"], CalibrationError, "window must be"),
        (["--commit", "often"], CalibrationError, "commit must be one of"),
        (
            ["--rounds", "0", "--limit", "-3"],
            CalibrationError,
            "rounds must be 1 or more, not 0; limit must be 1 or more, not -3",
        ),
        (["--variant", "nothing"], BundleError, "nothing"),
    ],
)
def test_wrong_requests_measure_nothing(
    request_for: Callable[..., BenchRequest],
    tmp_path: Path,
    arguments: list[str],
    error: type[MarsError],
    message: str,
) -> None:
    done = shell(request_for().bundle, "--task", request_for().task, "-o", tmp_path / "out", *arguments)
    assert isinstance(done.exception, error)
    with pytest.raises(error, match=message):
        raise done.exception
    assert not (tmp_path / "out").exists()


def test_a_missing_bundle(tmp_path: Path) -> None:
    done = shell(tmp_path / "nothing", "-o", tmp_path / "out")
    assert "no such bundle" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_task_whose_score_needs_an_answer(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(rows(answer=None, metric="exact_match"))
    with pytest.raises(
        CalibrationError, match="line 1: missing field 'answer', which score exact_match needs"
    ):
        bench(request_for())
