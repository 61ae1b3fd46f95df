"""The parts of a benchmark on made-up numbers and a fake device: settings, percentiles, break-even,
timelines, ratios, the order of things."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake import MASK, FakeBackend, Step

from mars_export.calibration.bench import bench as bench_module
from mars_export.calibration.bench.bench import Measurement
from mars_export.calibration.bench.compare import compare, wilson
from mars_export.calibration.bench.laps import Lap, Timeline, serve
from mars_export.calibration.bench.settings import BenchOptions, Setting
from mars_export.calibration.bench.steps import SWEEPS, CostCurve, StepTimer, curves, shape_key
from mars_export.calibration.journal import Journal, restore
from mars_export.calibration.rounds import Percentiles, Rounds, interleaved
from mars_export.calibration.tasks.tasks import Message, Task
from mars_export.runtime import CalibrationError, Commit, MarsError, SessionError, Stats
from mars_export.runtime.decode.backend import Cache, StepOutput
from mars_export.runtime.decode.budget import KvBudget
from mars_export.runtime.decode.row import Row

BLOCK = 4


class Blind(FakeBackend):
    """A fake device that predicts without a look at its cache, so that the cost of a step can be taken
    anywhere."""

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        assert int(kv_length.max()) + input_ids.shape[1] <= cache.capacity
        assert not want_logits
        self.steps.append(Step(first, input_ids, kv_length, output_index, cache.capacity))
        return StepOutput(np.ones(output_index.shape, np.int64), np.ones(output_index.shape, np.float32))


class Words:
    """The growing text of a fake answer: its tokens in figures."""

    def __init__(self) -> None:
        self.text, self.shown, self.stopped = "", 0, False

    def push(self, token: int) -> bool:
        self.text += f"{token} "
        return False

    def read(self) -> str:
        shown, self.shown = self.shown, len(self.text)
        return self.text[shown:]

    finish = read


def fake_session(backend: FakeBackend) -> Any:
    """As much of a session as a batcher and a benchmark need."""

    def new_row(index: int, prompt: Any, config: Any, most: int | None = None) -> Any:  # noqa: ARG001
        words = Words()
        return Row(index, [1 + len(m["content"]) for m in prompt], config, (), words.push), words

    manifest = SimpleNamespace(block=BLOCK, source="fake", tokens=SimpleNamespace(mask=MASK, eos=()))
    return SimpleNamespace(
        backend=backend,
        bundle=SimpleNamespace(manifest=manifest),
        variant=SimpleNamespace(name="fake"),
        check=lambda _config: None,
        kv_budget=KvBudget,
        new_row=new_row,
        text=Words(),
        policy=lambda: None,
        cost=None,
    )


def task(words: str, answer: str = "", limit: int = 6) -> Task:
    return Task((Message("user", words),), "agreement", answer or None, limit)


def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
    """Sure of all but every fifth token."""
    at = len(known) + masks
    return 1 + at % 9, 0.1 if at % 5 == 0 else 0.99


# --- settings and options ---


def test_one_token_mode_comes_first_and_nothing_twice() -> None:
    options = BenchOptions(
        taus=(0.9, 1.0, 0.9),
        batches=(1, 4, 1),
        windows=("auto", 2),
        commits=("cursor", "block"),
        exact=False,
    )
    settings = options.settings
    assert settings[0] == Setting(1)
    assert settings[0].is_baseline
    assert len(set(settings)) == len(settings) == 2 * (1 + 2 + 2 + 1)
    assert next(s for s in settings if s.batch == 4) == Setting(4)
    assert len({s.name for s in settings}) == len(settings)
    both = replace(options, exact=True).settings
    exact = [s for s in both if s.is_exact]
    assert exact == [Setting(batch, None, window) for batch in (1, 4) for window in ("auto", 2)]
    assert [s for s in both if not s.is_exact] == list(settings)
    assert both[:2] == (Setting(1), Setting(1, None)), "exact beside one token, in every round"
    assert Setting(1, None).baseline == Setting(1) and not Setting(1, None).is_baseline
    assert Setting(1, None).config(3).exact
    assert BenchOptions(taus=()).settings == (Setting(1), Setting(1, None)), "no tau has to be compared"
    slow = Setting(4, 1.0, "auto", Commit("block"))
    assert slow in settings and not slow.is_baseline and slow.baseline == Setting(4)


def test_a_slice_fills_the_largest_batch_several_times() -> None:
    assert BenchOptions().most_rows == 16
    assert BenchOptions(batches=(1, 8)).most_rows == BenchOptions(batches=(1, 8)).slice_rows == 32
    assert BenchOptions(batches=(8,), limit=5).most_rows == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batches": (0,)}, "batch must be 1 or more, not 0"),
        ({"taus": (math.nan,)}, "tau must be a number of 0 or more, not nan"),
        ({"taus": (-0.5,)}, "tau must be a number of 0 or more"),
        ({"taus": (), "exact": False}, "give at least one tau"),
        ({"windows": ("wide",)}, "window must be .* not 'wide'"),
        ({"windows": (0,)}, "window must be"),
        ({"commits": ("often",)}, "commit must be one of cursor, block"),
        ({"commits": ("block",), "cache_block": 0}, "cache_block must be 1 or more"),
        (
            {"rounds": 0, "limit": 0, "cursor": -1},
            "rounds must be 1 or more, not 0; limit must be .*; cursor must be",
        ),
        ({"batches": (0,), "taus": (math.inf,)}, "batch must be .*; tau must be"),
    ],
)
def test_options_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        BenchOptions(**values)


def test_a_setting_is_checked_where_it_is_built() -> None:
    with pytest.raises(MarsError, match="batch must be"):
        Setting(0)
    with pytest.raises(MarsError, match="tau must be"):
        Setting(1, math.nan)


# --- numbers ---


def test_percentiles_between_neighbours() -> None:
    found = Percentiles.of([float(n) for n in range(101)])
    assert found == Percentiles(50.0, 99.0, 101)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 1)
    assert Percentiles.of([1.0, 2.0]) == Percentiles(1.5, pytest.approx(1.99), 2)
    assert Percentiles.of([]) is None
    assert Rounds.of([3.0, 1.0, 9.0]) == Rounds(3.0, 1.0, 9.0)


def test_what_a_reader_waits_for() -> None:
    stats = Stats(forwards=2, proposed=5, verified=3)
    made = Timeline.of("a b c d", (1, 2, 3, 4), stats, "length", 10.0, [10.5, 10.8])
    assert (made.forwards, made.proposed, made.verified) == (2, 5, 3)
    assert (made.ttft, made.gaps) == (0.5, (0.3,))
    assert made.tpot == pytest.approx(0.1), "the time after the first event over all tokens but the first"
    assert Timeline.of("", (7,), Stats(forwards=1), "eos", 1.0, [1.25]).tpot is None
    assert Timeline.of("", (), Stats(), "capacity", 1.0, []).ttft is None
    assert restore(Timeline, json.loads(json.dumps(asdict(made)))) == made


def curve(relative: Sequence[float], slots: Sequence[int] = (1, 4, 8, 15)) -> CostCurve:
    points = tuple(Rounds(r, r, r) for r in relative)
    return CostCurve(1, tuple(slots), points, points)


def test_break_even_is_where_a_step_costs_what_it_yields() -> None:
    assert curve([1, 1, 1, 1]).break_even(8) == 1.0, "free slots: any gain is a gain"
    assert curve([1, 1, 2, 2]).break_even(8) == 2.0
    rising = curve([1, 4, 8, 15])
    assert rising.break_even(8) is None, "slots that cost what they are worth cannot pay"
    assert rising.break_even(1) == 1.0
    k = curve([1, 1.3, 1.7, 2.4]).break_even(8)
    assert k is not None
    assert k == pytest.approx(curve([1, 1.3, 1.7, 2.4]).cost(k + 7), abs=0.01)
    assert curve([1, 1.5, 2, 3]).cost(6) == 1.75


def test_ratios_are_taken_within_a_sweep() -> None:
    sweeps = [{"1x1": 10.0, "1x4": 20.0}, {"1x1": 100.0, "1x4": 200.0}, {"1x1": 30.0, "1x4": 63.0}]
    (made,) = curves(sweeps, (1,), (1, 4))
    assert made.milliseconds[1] == Rounds(63.0, 20.0, 200.0)
    assert made.relative == (Rounds(1.0, 1.0, 1.0), Rounds(2.0, 2.0, pytest.approx(2.1)))
    assert made.to_dict()["points"][1]["slots"] == 4


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (7, 8, 0.529, 0.978),
        (6, 8, 0.409, 0.929),
        (0, 10, 0.0, 0.278),
        (10, 10, 0.722, 1.0),
        (50, 100, 0.404, 0.596),
    ],
)
def test_the_interval_of_a_score_is_wilsons(right: float, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert wilson(right, count, 0.99)[1] >= wilson(right, count)[1]


# --- the fake device ---


def test_a_sweep_looks_at_every_shape_at_the_stated_cursor() -> None:
    backend = Blind(predict, max_capacity=100)
    timer = StepTimer(fake_session(backend), (1, 3), 50)
    assert timer.slots == (1, 2, 3, 4, 6, 7)
    sweep = timer.sweep(0)
    assert set(sweep) == {shape_key(b, s) for b in (1, 3) for s in timer.slots}
    assert next(iter(timer.sweep(3))) == "1x4", "each turn begins elsewhere"
    assert {(s.rows, s.slots) for s in backend.steps} == {(b, s) for b in (1, 3) for s in timer.slots}
    assert all(s.kv_length.tolist() == [50] * s.rows for s in backend.steps)
    for s in backend.steps:
        assert s.output_index[0].tolist() == list(range(max(0, s.slots - BLOCK), s.slots)), (
            "the last pending token and the masks"
        )


def test_a_sweep_keeps_within_the_device() -> None:
    timer = StepTimer(fake_session(Blind(predict, max_capacity=20, max_slots=4)), (2,), 256)
    assert timer.slots == (1, 2, 3, 4)
    assert timer.cursor == 16


def test_a_batch_that_memory_does_not_hold() -> None:
    class Full(Blind):
        def new_cache(self, num_rows: int) -> Any:
            def reserve(capacity: int) -> None:
                raise MemoryError(f"{num_rows} rows of {capacity}")

            return SimpleNamespace(reserve=reserve)

    with pytest.raises(CalibrationError, match="no memory for a batch of 999 rows of 8 tokens"):
        StepTimer(fake_session(Full(predict)), (1, 999), 8)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(1),
        Setting(3),
        Setting(3, 0.5),
        Setting(3, 0.5, 2),
        Setting(3, None, "full"),
        Setting(2, 0.5, "auto", Commit("block", 3)),
    ],
)
def test_rows_are_served_with_the_time_of_each_event(setting: Setting) -> None:
    tasks = [task("a" * n, limit=3 + n) for n in range(1, 8)]
    backend = FakeBackend(predict)
    lap = serve(fake_session(backend), tasks, setting)
    assert [len(a.token_ids) for a in lap.answers] == [t.max_new_tokens for t in tasks], (
        "each in its place, whoever came first"
    )
    assert lap.tokens == sum(t.max_new_tokens for t in tasks)
    for answer in lap.answers:
        assert answer.text.split() == [str(token) for token in answer.token_ids]
        assert answer.ttft is not None and 0 <= answer.ttft <= lap.seconds
        assert answer.ttft + sum(answer.gaps) <= lap.seconds + 1e-3
        assert len(answer.gaps) < answer.forwards or setting.commit.kind == "block"
        assert answer.finish_reason == "length"
    if setting.config(1).one_token:
        assert all(a.forwards == len(a.token_ids) == len(a.gaps) + 1 for a in lap.answers)
    assert max(step.rows for step in backend.steps) <= setting.batch
    assert restore(Lap, json.loads(json.dumps(asdict(lap)))) == lap


@pytest.mark.parametrize("setting", [Setting(2), Setting(2, 0.5, "auto", Commit("block", 3))])
def test_a_failing_device_fails_the_lap_and_leaves_no_thread_waiting(setting: Setting) -> None:
    class Broken(FakeBackend):
        def step(self, *_: Any) -> StepOutput:
            raise SessionError("the device is on fire")

    with pytest.raises(SessionError, match="on fire"):
        serve(fake_session(Broken(predict)), [task("a" * n) for n in range(1, 30)], setting)


# --- laps ---


def answer(tokens: Sequence[int], forwards: int, reason: str = "length") -> Timeline:
    return Timeline(" ".join(map(str, tokens)), tuple(tokens), forwards, reason, 0.1, (0.2,) * (forwards - 1))


def lap(seconds: float, *answers: Timeline, memory: int | None = 5) -> Lap:
    return Lap(seconds, memory, answers)


def test_speeds_are_of_rounds_and_ratios_of_the_same_round() -> None:
    one, fast = Setting(1), Setting(1, 0.5)
    same, other = answer([1, 2, 3, 4], 2), answer([1, 2, 3, 9], 2)
    plain = answer([1, 2, 3, 4], 4)
    laps = {
        one: [
            [lap(4.0, plain), lap(4.0, plain)],
            [lap(40.0, plain), lap(40.0, plain)],
            [lap(4.0, plain), lap(4.0, plain)],
        ],
        fast: [
            [lap(2.0, same), lap(2.0, other)],
            [lap(10.0, same), lap(10.0, other)],
            [lap(2.0, same, memory=9), lap(2.0, same)],
        ],
    }
    first, second = compare([task("x"), task("y")], laps)
    assert first.speed_up == Rounds(1.0, 1.0, 1.0)
    assert first.tokens_per_second == Rounds(1.0, 0.1, 1.0)
    assert second.speed_up == Rounds(2.0, 2.0, 4.0), "a busy round slows both down"
    assert (first.tokens_per_forward, second.tokens_per_forward) == (1.0, 2.0)
    assert (second.score, second.same_answers, second.unsteady) == (0.5, 0.5, 1)
    assert (second.answers, second.tokens, second.peak_memory) == (2, 8, 9)
    assert second.itl == Percentiles(0.2, pytest.approx(0.2), 6)
    unknown = compare([task("x")], {one: [[lap(1.0, plain, memory=None)]]})
    assert next(unknown).peak_memory is None


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Laps that take no time; the list says which setting decoded how many rows."""
    order: list[tuple[str, int]] = []

    def fake_serve(_: Any, tasks: Sequence[Task], setting: Setting) -> Lap:
        if tasks[0].max_new_tokens != bench_module.WARM_TOKENS:
            order.append((setting.name, len(tasks)))
        return lap(1.0, *(answer([len(t.messages[0].content)], 1) for t in tasks))

    monkeypatch.setattr(bench_module, "serve", fake_serve)
    return order


def journal(path: Path, *, resume: bool = False) -> Journal:
    return Journal.open(path / "state.jsonl", {"kind": "bench"}, resume=resume, force=False)


def test_every_slice_goes_through_all_settings_each_time_from_another_one(
    scripted: list[tuple[str, int]], tmp_path: Path
) -> None:
    options = BenchOptions(taus=(0.9, 0.5), rounds=2, limit=40, exact=False)
    tasks = [task("a" * n) for n in range(40)]
    made = Measurement(fake_session(Blind(predict)), journal(tmp_path), options).laps(tasks)
    names = [s.name for s in options.settings]
    turns = [scripted[i : i + 3] for i in range(0, len(scripted), 3)]
    assert [sorted(name for name, _ in turn) for turn in turns] == [sorted(names)] * 6
    assert [turn[0][0] for turn in turns] == [names[n % 3] for n in range(6)]
    assert [turn[0][1] for turn in turns] == [16, 16, 8] * 2
    for rounds in made.values():
        assert [len(laps) for laps in rounds] == [3, 3]
        assert [a.token_ids[0] for one in rounds[1] for a in one.answers] == list(range(40)), (
            "rows in their order"
        )
    fifth = list(interleaved(options.settings, 3, 2))[12:15]
    assert fifth == [(1, 1, options.settings[i]) for i in (1, 2, 0)]


def test_an_interrupted_run_measures_only_what_is_missing(
    scripted: list[tuple[str, int]], tmp_path: Path
) -> None:
    options = BenchOptions(rounds=3, limit=16, exact=False)
    tasks = [task("a" * n) for n in range(16)]
    session = fake_session(Blind(predict))

    def stop(phase: str, done: int, _: int) -> None:
        if phase == bench_module.ANSWERS and done == 48:
            raise KeyboardInterrupt

    kept = journal(tmp_path)
    first = Measurement(session, kept, options, stop)
    first.sweeps(StepTimer(session, (1,), 8))
    with pytest.raises(KeyboardInterrupt):
        first.laps(tasks)
    kept.close()
    assert len(scripted) == 3
    seen: list[tuple[str, int, int]] = []
    second = Measurement(session, journal(tmp_path, resume=True), options, lambda *news: seen.append(news))
    steps = len(session.backend.steps)
    assert len(second.sweeps(StepTimer(session, (1,), 8))) == SWEEPS * 3
    assert len(session.backend.steps) == steps, "all sweeps were there"
    second.laps(tasks)
    assert len(scripted) == 6
    assert seen[-1] == (bench_module.ANSWERS, 96, 96)
    more = replace(options, rounds=4)
    Measurement(session, journal(tmp_path, resume=True), more).laps(tasks)
    assert len(scripted) == 8, "further rounds may be added"
