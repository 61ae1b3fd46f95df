"""The choice by speed: interleaved rounds on a scripted session and clock, ties, and what the reason says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.calibrations import task

from mars_export import Completion, GenerationConfig, Stats
from mars_export.calibration.journal import Journal
from mars_export.calibration.rounds import busy_note
from mars_export.calibration.tau import race
from mars_export.calibration.tau.options import EXACT, ONE_TOKEN, name_of, setting

SETTINGS = {"one token": ONE_TOKEN, "tau 0.9": setting(0.9), "tau 0.5": setting(0.5)}
TASKS = [task("a" * i, limit=12) for i in range(40)]


class Clockwork:
    """A session whose every token takes 1 at tau 1, 1/2 at 0.9, 1/4 at 0.5 and 1/3 in exact mode, and a clock
    that knows; `slow` makes all of it as much slower."""

    def __init__(self) -> None:
        self.now, self.slow = 0.0, 1.0
        self.calls: list[tuple[float | None, int, int]] = []  # tau, rows, longest answer

    def perf_counter(self) -> float:
        return self.now

    def generate_each(
        self, prompts: Sequence[Any], config: Sequence[GenerationConfig], *, batch: int
    ) -> Iterator[Completion]:
        assert len(prompts) == len(config) >= batch
        self.calls.append((config[0].tau, len(prompts), config[0].max_new_tokens))
        for c in config:
            self.now += c.max_new_tokens * self.slow / {1.0: 1, 0.9: 2, 0.5: 4, None: 3}[c.tau]
            yield Completion("", (1,) * c.max_new_tokens, (), "length", Stats())


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    monkeypatch.setattr(race, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def journal(path: Path, *, resume: bool = False) -> Journal:
    return Journal.open(path / "state.jsonl", {}, resume=resume, force=False)


def run(
    session: Any, kept: Journal, report: Any = lambda *_: None, settings: Any = None
) -> dict[str, list[float]]:
    return race.race(session, kept, TASKS, settings or SETTINGS, 1, report)


def test_every_setting_decodes_the_same_rows_in_turns(session: Clockwork, tmp_path: Path) -> None:
    speeds = run(session, journal(tmp_path))
    assert speeds == {"one token": [1.0] * 3, "tau 0.9": [2.0] * 3, "tau 0.5": [4.0] * 3}
    warm, timed = session.calls[:3], session.calls[3:]
    assert {longest for *_, longest in warm} == {race.WARM_TOKENS}
    turns = [[tau for tau, *_ in timed[i : i + 3]] for i in range(0, len(timed), 3)]
    assert len(turns) == race.ROUNDS * 4, "32 rows in slices of 8"
    assert turns[:4] == [[1.0, 0.9, 0.5], [0.9, 0.5, 1.0], [0.5, 1.0, 0.9], [1.0, 0.9, 0.5]]
    assert {rows for _, rows, _ in timed} == {8}


def test_other_work_in_one_round_hits_all_alike(session: Clockwork, tmp_path: Path) -> None:
    def report(_: str, done: int, total: int) -> None:
        session.slow = 5.0 if total / 3 <= done < 2 * total / 3 else 1.0

    speeds = run(session, journal(tmp_path), report)
    assert speeds["tau 0.5"] == [4.0, 0.8, 4.0]
    assert [str(ratio) for ratio in race.speed_ups(speeds).values()] == ["1.00x", "2.00x", "4.00x"]


def test_what_was_timed_is_kept_but_not_for_another_field(session: Clockwork, tmp_path: Path) -> None:
    def stop(_: str, done: int, __: int) -> None:
        if done >= 100:
            raise KeyboardInterrupt

    kept = journal(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(session, kept, stop)
    kept.close()
    done = len(session.calls)
    first = run(session, journal(tmp_path, resume=True))
    assert len(session.calls) == 2 * 3 + race.ROUNDS * 4 * 3, "both runs warmed up, and no lap was run twice"
    assert done < len(session.calls)
    assert run(session, journal(tmp_path, resume=True)) == first
    assert len(session.calls) == 3 * 3 + race.ROUNDS * 4 * 3
    run(session, journal(tmp_path, resume=True), settings=dict(list(SETTINGS.items())[:2]))
    assert len(session.calls) == 3 * 3 + race.ROUNDS * 4 * 3 + 2 + race.ROUNDS * 4 * 2


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
    found = race.choose(dict(zip(SETTINGS, speeds, strict=True)))
    assert found[0] == choice
    assert reason in found[1]
    assert "3 interleaved rounds over the same rows" in found[1]


def test_a_lead_counts_in_every_round_and_beyond_a_tie() -> None:
    speeds = {
        "one token": [10.0] * 3,
        "a": [20.0, 20.0, 20.0],
        "b": [20.5, 20.5, 20.5],
        "c": [40.0, 19.0, 40.0],
    }
    assert race.not_slower(speeds, "a", "b") and race.not_slower(speeds, "b", "a"), "a tie"
    assert race.not_slower(speeds, "a", "c"), "not in every round"
    assert not race.not_slower(speeds, "one token", "a")
    assert str(race.speedup(speeds, "a", "one token")) == "2.00x"


def test_exact_mode_takes_part(session: Clockwork, tmp_path: Path) -> None:
    speeds = run(session, journal(tmp_path), settings={"one token": ONE_TOKEN, "exact": EXACT})
    assert speeds == {"one token": pytest.approx([1.0] * 3), "exact": pytest.approx([3.0] * 3)}
    assert (name_of(EXACT), name_of(ONE_TOKEN)) == ("exact", "one token")


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert busy_note(None) is busy_note(2.0) is None
    assert "the machine was busy (load 2.5 on 4 cores before the start)" in str(busy_note(2.5))
