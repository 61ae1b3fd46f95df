"""The demo's answers on a tiny bundle: three modes beside each other, and what is said of them. No speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import Named
from typer.testing import CliRunner

from mars_export.cli import app
from mars_export.exporter import demo
from mars_export.exporter.demo import MODES, REQUESTS, DemoAnswer, answers, summarize


@pytest.fixture(scope="module")
def made(bundles: Named) -> list[DemoAnswer]:
    return list(answers(bundles("qwen2"), 1))


def test_every_request_in_every_mode_one_token_first(made: list[DemoAnswer]) -> None:
    names = ["one token", "exact", "tau 0.95"]
    assert [mode.name for mode in MODES] == names
    assert [(a.request, a.mode) for a in made] == [(text, name) for _, text in REQUESTS for name in names]
    assert [a.tau for a in made[:3]] == [1.0, None, 0.95]


def test_exact_mode_gives_the_one_token_text_in_no_more_forwards(made: list[DemoAnswer]) -> None:
    one, exact, _ = summarize(made)
    texts = {mode.name: [a.text for a in made if a.mode == mode.name] for mode in MODES}
    assert texts["exact"] == texts["one token"]
    assert one.same == exact.same == exact.answers == len(REQUESTS)
    assert (
        one.tokens_per_forward == 1.0 <= exact.tokens_per_forward
    )  # auto windows: a tiny model gains nothing
    assert (one.speed_up, one.tokens) == (1.0, exact.tokens)


def test_another_text_is_counted_as_another() -> None:
    stats = demo.Stats(tokens=4, forwards=2)
    told = [
        DemoAnswer("r", mode.name, mode.config.tau, "x", mode.name != "tau 0.95", 2.0, stats)
        for mode in MODES
    ]
    lines = summarize(told)
    assert [(line.same, line.answers) for line in lines] == [(1, 1), (1, 1), (0, 1)]
    assert [line.tokens_per_second for line in lines] == [2.0] * 3


def test_the_command(made: list[DemoAnswer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "prepare", lambda output, progress: tmp_path)
    monkeypatch.setattr(demo, "answers", lambda bundle, threads: iter(made))
    shown = CliRunner().invoke(app, ["demo"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("  exact ") >= len(REQUESTS)
    assert shown.output.count("same text") >= len(REQUESTS)
    assert f"{len(REQUESTS)} of {len(REQUESTS)}" in shown.output
    assert "exact mode always gives the text of one token a step" in shown.output
    told = json.loads(CliRunner().invoke(app, ["demo", "--json"]).stdout)["answers"]
    assert [(a["mode"], a["tau"], a["same"]) for a in told[:2]] == [
        ("one token", 1.0, True),
        ("exact", None, True),
    ]
    assert set(told[0]["stats"]) >= {"proposed", "verified", "forwards"}
