"""A whole calibration on a tiny bundle, from the shell's side too: choice, report, profile, interruption and
bad input."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.missing import need
from support.paths import ROOT
from support.tiny import Named
from typer.testing import CliRunner

from mars_export.calibration.journal import restore
from mars_export.calibration.tasks.tasks import Task
from mars_export.calibration.tau import bounds, race
from mars_export.calibration.tau.calibrate import Change, changes_of
from mars_export.calibration.tau.decoding import Outcome
from mars_export.calibration.tau.exact import beside
from mars_export.calibration.tau.options import CalibrationOptions, setting
from mars_export.calibration.tau.report import Report, markdown
from mars_export.calibration.tau.run import Request, estimate, run
from mars_export.cli import app
from mars_export.runtime import CalibrationError, MarsError, Session
from mars_export.runtime.bundle.open import open_bundle, write_manifest

need("matplotlib", "calibrate")
REPORTS = ROOT / "docs" / "calibration"
WORDS = (
    "hello",
    "the cat",
    "one",
    "in the end",
    "an apple",
    "er",
    "on",
    "a hat",
    "thin air",
    "then",
    "he",
    "ten",
    "tan",
    "none",
    "a",
    "the",
)
OPTIONS = CalibrationOptions(max_drop=0.4, taus=(0.999, 0.9, 0.5, 0.0), batch=4)


def rows(**fields: Any) -> str:
    """Any answer is right, unless `fields` say otherwise."""
    common = {"answer": "", "metric": "contains", "max_new_tokens": 12} | fields
    return "".join(
        json.dumps({"messages": [{"role": "user", "content": word}], **common}) + "\n" for word in WORDS
    )


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds: only the report's own test does it."""
    if "report_folder" not in request.node.name:
        monkeypatch.setattr(
            "mars_export.calibration.tau.figure.save_png", lambda calibration, path: path.write_bytes(b"")
        )


@pytest.fixture
def bundle(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")


@pytest.fixture
def request_for(bundle: Path, tmp_path: Path) -> Callable[..., Request]:
    (tmp_path / "words.jsonl").write_text(rows())
    wanted = Request(bundle, str(tmp_path / "words.jsonl"), tmp_path / "out", threads=1, options=OPTIONS)
    return lambda **changes: replace(wanted, **changes)


def test_from_task_to_profile_to_answer(
    request_for: Callable[..., Request], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = race.race
    # Run as it is, but what a busy machine says of so short answers decides nothing here.
    monkeypatch.setattr(race, "race", lambda *a: by_order(*a) if real(*a) else {})
    (tmp_path / "others.jsonl").write_text(rows().replace('"content": "', '"content": "so '))
    made = run(request_for(confirm=tmp_path / "others.jsonl"))
    calibration = made.calibration
    assert calibration.num_rows == len(WORDS)
    assert calibration.speed_rows_same == calibration.speed_rows
    assert [t.passed for t in calibration.tested] == [True] * 4
    assert calibration.chosen is not None
    assert made.confirmation is not None
    assert "rows that the choice never saw" in str(made.confirmed)
    config = Session.open(bundle, threads=1).profile("words")
    assert config.tau == calibration.chosen.measured.tau
    evidence = open_bundle(bundle, full=True).manifest.profiles[0].evidence
    assert evidence["task"] == "words.jsonl"
    assert str(tmp_path) not in json.dumps(dict(evidence))


def test_agreement_is_foretold_and_testing_ends_at_the_first_failure(
    request_for: Callable[..., Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.jsonl").write_text(rows(answer=None, metric="agreement"))
    monkeypatch.setattr(race, "race", by_order)
    made = run(request_for(store=False)).calibration
    passed = [t.passed for t in made.tested]
    assert passed == [True] * (len(passed) - 1) + [False], "tau 0 cannot pass: nothing agrees there"
    for t in made.tested:
        assert t.drop == pytest.approx(1 - t.measured.agreement)
        assert t.predicted.agreement == t.measured.agreement
        assert t.passed == (t.p_value <= 0.05)
    assert made.chosen == (made.tested[-2] if len(passed) > 1 else None)


def by_order(*arguments: Any) -> dict[str, list[float]]:
    """Speeds as if each setting were twice as fast as the safer one before it."""
    return {name: [2.0**i] * 3 for i, name in enumerate(arguments[3])}


def test_the_choice_is_the_fastest_that_passed_and_says_so(
    request_for: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: list[list[str]] = []

    def speeds(*arguments: Any) -> dict[str, list[float]]:
        fields.append(list(arguments[3]))
        table = {"one token": 10.0, "tau 0.999": 12.0, "tau 0.9": 44.0, "tau 0.5": 45.0, "tau 0": 20.0}
        table["exact"] = 30.0
        return {name: [table[name]] * 3 for name in arguments[3]}

    monkeypatch.setattr(race, "race", speeds)
    made = run(request_for())
    calibration = made.calibration
    assert [t.passed for t in calibration.tested] == [True] * 4
    assert fields[0][0] == "one token"
    agreement = {t.measured.name: t.measured.agreement for t in calibration.tested}
    assert fields[0][-1] == "exact", "in the same rounds"
    assert [agreement[name] for name in fields[0][1:-1]] == sorted(agreement.values(), reverse=True)
    assert calibration.chosen is not None
    tie = next(name for name in fields[0] if name in ("tau 0.9", "tau 0.5"))
    assert calibration.chosen.measured.name == tie, "not the last one, and the safer of two that tie"
    assert [t.measured.tokens_per_second for t in calibration.tested] == [12.0, 44.0, 45.0, 20.0]
    assert calibration.one_token.tokens_per_second == 10.0
    assert (
        calibration.choice is not None and "tau 0.5, 4.50x the speed of one-token mode" in calibration.choice
    )
    assert ("choice", calibration.choice) in made.facts
    assert [line[-1] for line in made.table].count("chosen") == 1
    assert any(line[-2] == "4.50x" for line in made.table)
    assert f"{4.4 if tie == 'tau 0.9' else 4.5:.2f} times the speed of one-token mode" in made.headline
    ratio = {"tau 0.9": 44 / 30, "tau 0.5": 45 / 30}[tie]
    assert (
        made.verdict
        == f"{tie.capitalize()} is {ratio:.2f}x as fast as exact mode, which gives the one-token text."
    )
    assert calibration.exact is not None and not calibration.exact.suffices
    assert made.profile.evidence["needed"] is True


@pytest.mark.parametrize(
    ("exact", "said"),
    [
        (44.5, "as fast, within the margin of a tie, as"),
        (90.0, "faster than"),
    ],
)
def test_where_exact_mode_is_as_fast_no_profile_is_needed(
    request_for: Callable[..., Request],
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    exact: float,
    said: str,
) -> None:
    speeds = {
        "one token": 10.0,
        "tau 0.999": 12.0,
        "tau 0.9": 20.0,
        "tau 0.5": 45.0,
        "tau 0": 20.0,
        "exact": exact,
    }
    monkeypatch.setattr(race, "race", lambda *a: {name: [speeds[name]] * 3 for name in a[3]})
    made = run(request_for())
    found = made.calibration.exact
    assert found is not None and found.suffices
    assert f"Exact mode is {said} tau 0.5 ({exact / 10:.2f}x the speed of one-token mode)" in str(
        made.verdict
    )
    assert str(made.verdict).endswith("gives the one-token text: no profile is needed.")
    assert made.calibration.chosen is not None, "for those who want it all the same"
    assert made.calibration.chosen.measured.name == "tau 0.5"
    line = next(line for line in made.table if line[1] == "exact")
    assert line[2] == made.table[0][2], "the quality of one-token mode, by construction"
    assert line[5] == "100 %" and line[-1] == "lossless, enough"
    assert {example.tau for example in made.examples} == {None}
    profile = open_bundle(bundle).manifest.profiles[0]
    assert profile.tau == 0.5, "stored, and says that it is not needed"
    assert profile.evidence["needed"] is False
    assert found.verdict in profile.evidence["notes"]


@pytest.mark.parametrize(
    ("num_changed", "drops", "suffices", "said"),
    [
        (0, 0.0, True, "gives the one-token text: no profile is needed"),
        (4, 0.0, True, "in 496 of 500 rows (this precision rounds), at a mean drop of 0.0 points (below "),
        (
            100,
            1.0,
            False,
            "in 400 of 500 rows (this precision rounds), at a mean drop of 20.0 points (below ",
        ),
    ],
)
def test_where_rounding_parts_the_texts_exact_mode_must_keep_the_bound(
    num_changed: int, drops: float, suffices: bool, said: str
) -> None:
    def outcome(*ids: int) -> Outcome:
        return Outcome("", ids, 1, 1, 1.0, "eos")

    references = [outcome(1, 2)] * 500
    outcomes = [outcome(1, 3 if i % 500 < num_changed else 2) for i in range(500)]
    lost = np.array([drops if i < num_changed else 0.0 for i in range(500)])
    lost = np.random.default_rng(1).permutation(lost)
    speeds = {"one token": [10.0] * 3, "tau 0.9": [30.0] * 3, "exact": [40.0] * 3}
    options = CalibrationOptions(max_drop=0.02)
    found = beside(speeds, outcomes, references, lost, (0.9, (0.85, 0.95)), "tau 0.9", options)
    assert (found.same, found.num_rows, found.suffices) == (500 - num_changed, 500, suffices)
    assert found.quality == pytest.approx(0.9 - lost.mean())
    assert found.drop <= found.drop_bound and (found.drop_bound == 0) == (num_changed == 0)
    assert said in found.verdict
    assert found.verdict.endswith("no profile is needed" if suffices else "the bound is not shown")


def test_exact_rows_that_differ_have_all_rows_decoded(
    request_for: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a graph rounded: its exact answers are those of another tau."""
    monkeypatch.setattr("mars_export.calibration.tau.calibrate.CHECK_ROWS", 8)
    monkeypatch.setattr("mars_export.calibration.tau.calibrate.EXACT", setting(0.0))
    monkeypatch.setattr("mars_export.calibration.tau.exact.EXACT", setting(0.0))
    made = run(request_for(store=False, options=replace(OPTIONS, taus=(0.9,))))
    exact = made.calibration.exact
    assert exact is not None and exact.num_rows == len(WORDS) > exact.same
    assert exact.drop == 0.0 < exact.drop_bound, "any answer is right"
    assert next(line for line in made.table if line[1] == "exact")[-1].startswith("rounded")


def test_exact_mode_is_measured_where_no_tau_passes(
    request_for: Callable[..., Request], tmp_path: Path
) -> None:
    made = run(request_for(options=replace(OPTIONS, max_drop=0.02), store=False))
    exact = made.calibration.exact
    assert made.calibration.chosen is None and exact is not None
    assert exact.same == exact.num_rows == len(WORDS)
    assert exact.tokens_per_forward > 1
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"exact-mode check: {len(WORDS)} of {len(WORDS)} rows" in page
    assert str(made.verdict).replace("_", "") in page
    assert "one-token text" in str(made.verdict)


def test_nothing_faster_leaves_tau_at_one(
    request_for: Callable[..., Request], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "race", lambda *a: {name: [10.0 - i] * 3 for i, name in enumerate(a[3])})
    made = run(request_for())
    assert "One token is 2.00x as fast as exact mode" in str(made.verdict)
    assert made.table[1][-1] == "lossless"
    assert all(t.passed for t in made.calibration.tested)
    assert made.calibration.chosen is None
    assert "no setting that passed was faster than one-token mode" in str(made.calibration.choice)
    assert "No setting that passed was shown to be faster" in made.headline
    assert Session.open(bundle, threads=1).profile("words").one_token


def test_changed_answers_are_listed_worst_first(
    request_for: Callable[..., Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "race", by_order)
    (tmp_path / "words.jsonl").write_text(rows().replace('"hello"', '"hello <b> ``` | x"'))
    made = run(request_for(html=True, options=replace(OPTIONS, taus=(0.0,))))
    changes = made.calibration.changed
    assert made.calibration.chosen is not None
    assert len(changes) == made.num_changed > 2
    assert {c.row for c in changes} <= set(range(1, len(WORDS) + 1))
    page = (tmp_path / "out" / "report.md").read_text()
    listed = [int(n) for n in re.findall(r"\*\*Row (\d+)\*\*", page)]
    assert listed == [c.row for c in changes[:10]]
    assert f"{len(changes)} of {len(WORDS)} answers are not those of one-token mode" in page
    assert "<b>" not in (tmp_path / "out" / "report.html").read_text()


def test_the_worst_change_lost_most_and_then_changed_most() -> None:
    def outcome(*ids: int) -> Outcome:
        return Outcome(" ".join(map(str, ids)), ids, 1, 1, 1.0, "eos")

    cases = [  # row, before, after, answer
        (1, (1, 2, 3), (1, 2, 3), "1 2 3"),
        (2, (1, 2, 3), (1, 2, 4), "1 2 4"),  # gained
        (3, (1, 2, 3), (1, 2, 4), "x"),
        (4, (1, 2, 3), (7, 8, 9), "x"),
        (5, (1, 2, 3), (1, 2, 4), "1 2 3"),  # lost
    ]
    tasks = [Task((), "exact_match", answer, 8, text="p", number=n) for n, *_, answer in cases]
    before, after = [outcome(*b) for _, b, *_ in cases], [outcome(*a) for *_, a, _ in cases]
    found = changes_of(tasks, before, after)
    assert [c.row for c in found] == [5, 4, 3, 2]
    assert found[0] == Change(5, "p", "1 2 3", "1 2 4", 1.0, 0.0)


def test_a_second_bundle_has_its_own_folder_and_its_own_state(
    request_for: Callable[..., Request], bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = request_for(output=None, store=False)
    second = replace(first, bundle=shutil.copytree(bundles("llama"), tmp_path / "other.bundle"))
    for request in (first, second):
        run(request)
    assert (first.folder, second.folder) == (Path("calibration-words-mine"), Path("calibration-words-other"))
    assert all((request.folder / "report.md").exists() for request in (first, second))
    same = tmp_path / "same"
    for request in (first, second):
        run(replace(request, output=same))
    assert len(list(same.glob("state-*.jsonl"))) == 2
    with pytest.raises(CalibrationError, match="--resume uses them"):
        run(replace(first, output=same))
    run(replace(first, output=same, resume=True))


def test_a_score_that_raises_names_the_row_and_keeps_what_was_decoded(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_scores.py").write_text(
        "def third(output, answer):\n    return 1 if answer != '3' else 1 / 0\n"
    )
    lines = [
        json.dumps({"prompt": word, "answer": str(i + 1), "max_new_tokens": 6})
        for i, word in enumerate(WORDS)
    ]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    common = (
        "calibrate",
        bundle,
        "--task",
        tmp_path / "words.jsonl",
        "-o",
        tmp_path / "out",
        "--threads",
        "1",
    )
    done = shell(*common, "--score", "odd_scores:third")
    assert isinstance(done.exception, CalibrationError)
    assert re.search(
        r"row 3: score odd_scores:third raised ZeroDivisionError: .*; called with '", str(done.exception)
    )
    (state,) = (tmp_path / "out").glob("state-*.jsonl")
    assert len(state.read_text().splitlines()) == 1 + len(WORDS)


@pytest.mark.parametrize("folder", sorted(p.parent.name for p in REPORTS.glob("*/report.json")))
def test_the_pages_in_docs_are_those_of_their_figures(folder: str) -> None:
    figures = json.loads((REPORTS / folder / "report.json").read_text(encoding="utf-8"))
    page = (REPORTS / folder / "report.md").read_text(encoding="utf-8")
    assert markdown(restore(Report, figures), "pareto.png") == page
    assert (REPORTS / folder / "pareto.png").exists()


def test_the_report_folder(request_for: Callable[..., Request], tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(rows().replace("hello", "<script>alert(1)</script> | & more"))
    made = run(request_for(html=True))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["task"] == "words.jsonl"
    picture = (tmp_path / "out" / "pareto.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    assert base64.b64encode(picture).decode() in page
    assert "<script" not in page
    assert "http" not in page
    result = made.headline.partition(": ")[2]
    assert result[1:] in page
    text = (tmp_path / "out" / "report.md").read_text()
    assert "](pareto.png)" in text
    assert result[1:] in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(made.table)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "every line has all the columns"
    assert "<script" not in re.sub(r"(?s)```text.*?```", "", text)


def test_a_page_is_written_as_html_only_if_asked_for(
    request_for: Callable[..., Request], tmp_path: Path
) -> None:
    run(request_for())
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if "state" not in p.name) == [
        "pareto.png",
        "report.json",
        "report.md",
    ]


def test_an_interrupted_run_goes_on(request_for: Callable[..., Request], tmp_path: Path) -> None:
    def stop_later(phase: str, done: int, _: int) -> None:
        if phase == "probability 0.9" and done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(request_for(), stop_later)
    (state,) = (tmp_path / "out").glob("state-*.jsonl")
    kept = len(state.read_text().splitlines())
    assert not (tmp_path / "out" / "report.json").exists()
    with pytest.raises(CalibrationError, match="--resume uses them"):
        run(request_for())
    work: dict[str, list[int]] = {}
    run(request_for(resume=True), lambda phase, done, total: work.setdefault(phase, []).append(done))
    assert work["record"] == [len(WORDS)]
    assert work["probability 0.9"][0] == 8
    assert len(state.read_text().splitlines()) > kept
    again: dict[str, list[int]] = {}
    bolder = replace(OPTIONS, max_drop=0.5)
    run(
        request_for(resume=True, name="bolder", options=bolder, store=False),
        lambda phase, done, total: again.setdefault(phase, []).append(done),
    )
    assert again["record"] == again["probability 0.999"] == [len(WORDS)]


def test_too_few_rows_leave_tau_at_one(request_for: Callable[..., Request], bundle: Path) -> None:
    made = run(request_for(options=replace(OPTIONS, max_drop=0.02)))
    assert made.calibration.tested == ()
    assert f"{bounds.items_needed(0.02, 0.05)} are needed. tau stays 1" in made.calibration.notes[0]
    assert Session.open(bundle, threads=1).profile("words").one_token


def test_short_answers_cannot_be_helped(request_for: Callable[..., Request], tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(rows(max_new_tokens=3))
    made = run(request_for())
    assert made.calibration.chosen is None
    assert "tau cannot help" in made.calibration.notes[0]


def test_three_metrics_share_the_error(request_for: Callable[..., Request]) -> None:
    options = CalibrationOptions(max_drop=0.5, metrics=("probability", "margin", "entropy"), batch=8)
    made = run(request_for(options=options)).calibration
    assert options.level == pytest.approx(0.05 / 3)
    assert {t.measured.metric for t in made.tested} == set(options.metrics)
    for t in made.tested:
        assert t.passed == (t.p_value <= 0.05 / 3)


def test_prompts_that_do_not_fit_are_counted_and_reported(
    request_for: Callable[..., Request], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(rows() + rows().splitlines()[0].replace("hello", "a " * 600) + "\n")
    made = run(request_for())
    assert made.calibration.too_long == (len(WORDS) + 1,)
    assert any(
        "left out, their prompts are longer than the context: 17" in note for note in made.calibration.notes
    )
    (tmp_path / "words.jsonl").write_text(rows().splitlines()[0].replace("hello", "a " * 600))
    with pytest.raises(CalibrationError, match="every prompt is longer than the context of 512"):
        run(request_for(force=True))


def test_answers_that_fill_the_context_are_counted(
    request_for: Callable[..., Request], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(
        rows()
        .splitlines()[0]
        .replace("hello", "a" * 480)
        .replace('"max_new_tokens": 12', '"max_new_tokens": 400')
    )
    made = run(request_for()).calibration
    assert made.cut_short == 1 or made.answer_range[1] < 30


def test_a_bundle_without_a_tokenizer_or_metrics(request_for: Callable[..., Request], bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    write_manifest(bundle, replace(manifest, text=None))
    with pytest.raises(CalibrationError, match="no tokenizer, and tasks are text"):
        run(request_for())


def test_a_confirmation_on_the_same_rows_is_refused(
    request_for: Callable[..., Request], tmp_path: Path
) -> None:
    with pytest.raises(CalibrationError, match="16 prompts are also in the calibration rows"):
        run(request_for(confirm=tmp_path / "words.jsonl"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_drop": 0}, "max_drop must be between 0 and 1"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"metrics": ("luck",)}, "metrics must be different ones"),
        ({"metrics": ("margin", "margin")}, "metrics must be different ones"),
        ({"metrics": ()}, "metrics must be different ones"),
        ({"metrics": ("margin", "entropy"), "taus": (0.9,)}, "one metric only"),
        ({"taus": (0.8, 0.9)}, "from safe to fast"),
        ({"taus": (1.0, 0.9)}, "from safe to fast"),
        ({"taus": (0.9, 0.9)}, "from safe to fast"),
        ({"taus": (float("nan"),)}, "from safe to fast"),
        ({"metrics": ("entropy",), "taus": (0.5, 0.2)}, "from safe to fast"),
        ({"limit": 0, "batch": 0}, "limit must be 1 or more, not 0; batch must be"),
    ],
)
def test_options_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        CalibrationOptions(**values)


def test_an_estimate_writes_nothing(request_for: Callable[..., Request], tmp_path: Path) -> None:
    found = estimate(request_for())
    assert found.num_rows == len(WORDS)
    assert len(found.candidates) == 4
    assert found.seconds > found.record_seconds > 0
    assert dict(found.needed)[0.05] == bounds.items_needed(0.05, 0.05)
    assert not (tmp_path / "out").exists()


def shell(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_commands(request_for: Callable[..., Request], bundle: Path, tmp_path: Path) -> None:
    task, out = request_for().task, tmp_path / "out"
    common = (
        "calibrate",
        bundle,
        "--task",
        task,
        "--max-drop",
        "0.4",
        "--taus",
        "0.999,0.5",
        "--threads",
        "1",
        "--batch",
        "8",
        "-o",
        out,
    )
    assert json.loads(shell(*common, "--dry-run", "--json").stdout)["num_rows"] == len(WORDS)
    done = shell(*common)
    assert done.exit_code == 0, done.output
    assert "words.jsonl: tau" in done.output
    assert "report.md" in done.output
    assert json.loads(shell("profiles", "list", bundle, "--json").stdout)[0]["name"] == "words"
    assert "good" in shell("profiles", "list", bundle).stdout
    assert json.loads(shell("profiles", "show", bundle, "words", "--json").stdout)["stale"] == []
    shown = shell("profiles", "show", bundle, "words").stdout
    assert "{" not in shown and "[" not in shown, "people read it"
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if line.strip()}
    assert (lines["name"], lines["window"], lines["state"]) == ("words", "full", "good")
    assert (lines["task"], lines["num_rows"], lines["max_drop"]) == ("words.jsonl", "16", "0.4")
    assert re.fullmatch(r"\d+, \d+", lines["prompt_tokens"])
    assert lines["needed"] in ("yes", "no")
    assert "exact mode" in lines["notes"]
    tau = open_bundle(bundle).manifest.profiles[0].tau
    answer = shell("generate", bundle, "-p", "hello", "--profile", "words", "--max-new-tokens", "4", "--json")
    assert json.loads(answer.stdout)["tau"] == tau
    both = shell("generate", bundle, "-p", "hello", "--profile", "words", "--tau", "0.5")
    assert "not both" in str(both.exception)
    unknown = shell("generate", bundle, "-p", "hello", "--profile", "sums")
    assert "(there are: words)" in str(unknown.exception)
    assert shell("profiles", "remove", bundle, "words").exit_code == 0
    assert "no profiles" in shell("profiles", "list", bundle).stdout
    assert isinstance(shell("profiles", "remove", bundle, "words").exception, MarsError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        ('{"messages": [], "answer"', "line 1: not JSON"),
        ('{"answer": "x"}', "missing field 'messages'"),
        ('{"prompt": "x", "metric": "luck"}', "unknown score 'luck' .known: exact_match"),
        ('{"prompt": "x", "metric": "exact_match"}', "missing field 'answer', which score exact_match needs"),
    ],
)
def test_bad_task_files_are_refused_before_anything_is_decoded(
    bundle: Path, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(rows() * bool(content) + content)
    done = shell("calibrate", bundle, "--task", tmp_path / "bad.jsonl", "-o", tmp_path / "out")
    assert isinstance(done.exception, CalibrationError)
    assert re.search(message.replace("line 1:", f"line {len(WORDS) + 1}:"), str(done.exception))
    assert not (tmp_path / "out").exists()
