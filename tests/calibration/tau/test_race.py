"""The choice by speed: interleaved rounds on a scripted session and clock, ties, and what the reason says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.calibrations import laps_of, task

from mars_export import Completion, GenerationConfig, Stats
from mars_export.calibration import rounds
from mars_export.calibration.rounds import busy_note
from mars_export.calibration.tau import race
from mars_export.calibration.tau.options import EXACT, ONE_TOKEN, setting

SETTINGS = {"one token": ONE_TOKEN, "tau 0.9": setting(0.9), "tau 0.5": setting(0.5), "exact": EXACT}
TASKS = [task("a" * i, limit=12) for i in range(80)]


class Clockwork:
    """A session whose every token takes 1 at tau 1, 1/2 at 0.9, 1/4 at 0.5 and 1/3 in exact mode, and a clock
    that knows; `slow` makes all of it as much slower."""

    def __init__(self) -> None:
        self.now, self.slow = 0.0, 1.0
        self.calls: list[tuple[float | None, int, int]] = []  # tau, rows, longest answer
        self.salts: set[str] = set()

    def perf_counter(self) -> float:
        return self.now

    def generate_each(
        self, prompts: Sequence[Any], config: Sequence[GenerationConfig], *, batch: int, drafts: Any
    ) -> Iterator[Completion]:
        assert len(prompts) == len(config) >= batch and not drafts
        assert len({c.cache_salt for c in config} - self.salts) == len(config), "no prompt is shared"
        self.salts |= {c.cache_salt for c in config}
        self.calls.append((config[0].tau, len(prompts), config[0].max_new_tokens))
        for c in config:
            self.now += c.max_new_tokens * self.slow / {1.0: 1, 0.9: 2, 0.5: 4, None: 3}[c.tau]
            yield Completion("", (1,) * c.max_new_tokens, (), "length", Stats())


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def run(session: Any, report: Any = lambda *_: None) -> race.Laps:
    return race.race(session, TASKS, SETTINGS, 1, report)


def speeds_of(laps: race.Laps) -> dict[str, Any]:
    return {name: pytest.approx([lap.speed for lap in made]) for name, made in laps.items()}


def test_every_setting_decodes_the_same_rows_in_turns(session: Clockwork) -> None:
    laps = run(session)
    found = {name: race.tokens_per_second(laps, name) for name in laps}
    assert found == pytest.approx({"one token": 1.0, "tau 0.9": 2.0, "tau 0.5": 4.0, "exact": 3.0})
    warm, timed = session.calls[:4], session.calls[4:]
    assert {longest for *_, longest in warm} == {rounds.WARM_TOKENS}
    turns = [[tau for tau, *_ in timed[i : i + 4]] for i in range(0, len(timed), 4)]
    assert turns == [[1.0, 0.9, 0.5, None], [0.9, 0.5, None, 1.0], [0.5, None, 1.0, 0.9]]
    assert {rows for _, rows, _ in timed} == {8}
    assert {lap.tokens for made in laps.values() for lap in made} == {8 * 12}


def test_other_work_in_one_round_hits_all_alike(session: Clockwork) -> None:
    def report(_: str, done: int, total: int) -> None:
        session.slow = 5.0 if total / 3 <= done < 2 * total / 3 else 1.0

    laps = run(session, report)
    assert speeds_of(laps)["tau 0.5"] == [4.0, 0.8, 4.0]
    ratios = race.speed_ups(laps)
    assert [ratio.median for ratio in ratios.values()] == pytest.approx([1.0, 2.0, 4.0, 3.0])
    assert all(ratio.high - ratio.low < 1e-6 for ratio in ratios.values())


@pytest.mark.parametrize(
    ("rows", "batch", "raced"), [(500, 1, 8), (40, 1, 8), (12, 1, 4), (3, 1, 3), (500, 8, 32), (20, 8, 20)]
)
def test_few_rows_make_a_short_race(rows: int, batch: int, raced: int) -> None:
    assert race.num_rows(rows, batch) == raced


@pytest.mark.parametrize(
    ("speeds", "choice", "reason"),
    [
        (([10, 10, 10], [20, 20, 20], [30, 30, 30]), "tau 0.5", "passed was tau 0.5, 3.00x"),
        (([10, 10, 10], [30, 30, 30], [20, 20, 20]), "tau 0.9", "passed was tau 0.9, 3.00x"),
        (([10, 10, 10], [29.5, 29.5, 29.5], [30, 30, 30]), "tau 0.9", "but tau 0.9 (2.95x) ties with it"),
        (([10, 10, 10], [20, 31, 20], [30, 30, 30]), "tau 0.9", "but tau 0.9 (2.00x (2.00-3.10)) ties"),
        (([10, 10, 10], [9, 9, 9], [8, 8, 8]), "one token", "no setting that passed was faster"),
        (([10, 10, 10], [10.1, 10.1, 10.1], [9, 9, 9]), "one token", "but one-token mode ties with it"),
        (([10, 50, 10], [20, 20, 20], [30, 30, 30]), "one token", "(0.60-3.00) the speed of one-token mode"),
    ],
)
def test_the_safest_of_the_fastest(speeds: Sequence[Sequence[float]], choice: str, reason: str) -> None:
    found = race.choose(laps_of(dict(zip(SETTINGS, speeds, strict=False))))
    assert found[0] == choice
    assert reason in found[1]
    assert "3 interleaved rounds over the same rows" in found[1]


def test_a_lead_counts_in_every_round_and_beyond_a_tie() -> None:
    speeds = laps_of(
        {"one token": [10.0] * 3, "a": [20.0, 20.0, 20.0], "b": [20.5, 20.5, 20.5], "c": [40.0, 19.0, 40.0]}
    )
    assert race.not_slower(speeds, "a", "b") and race.not_slower(speeds, "b", "a"), "a tie"
    assert race.not_slower(speeds, "a", "c"), "not in every round"
    assert not race.not_slower(speeds, "one token", "a")
    assert str(rounds.speed_up(speeds["a"], speeds["one token"])) == "2.00x"


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert busy_note(None) is busy_note(2.0) is None
    assert "the machine was busy (load 2.5 on 4 cores before the start)" in str(busy_note(2.5))
