"""Planning: the simulation against formulas and against the real loop on a clock of its own; the command."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.fake import MASK, FakeBackend
from support.fixtures import Sessions
from support.shell import run
from support.tiny import Named

from mars_export.calibration.plan import arrivals
from mars_export.calibration.plan.fleet import BALANCES, Balance, Fleet, Machine, Replica
from mars_export.calibration.plan.options import PlanOptions, modes_of
from mars_export.calibration.plan.plan import PlanRequest, plan
from mars_export.calibration.plan.search import fewest
from mars_export.calibration.plan.steps import Shape, Walker, best_shapes, widest
from mars_export.calibration.plan.work import Mode, Work, work_of
from mars_export.calibration.tasks.tasks import Message, Task
from mars_export.calibration.tau.record import record
from mars_export.calibration.tau.replay import walk
from mars_export.runtime import CalibrationError, GenerationConfig
from mars_export.runtime.decode.cost import Cost
from mars_export.runtime.decode.row import Row
from mars_export.runtime.decode.schedule import Limits, Schedule

EXACT, ONE, TAU = Mode("exact", True), Mode("one token", False), Mode("tau 0.5", False, 0.5)
BLOCK = 4
SECOND = Cost(((1, 1.0),))  # any step takes a second
RISING = Cost(((1, 1.0), (64, 7.3)))


def fleet(mode: Mode, works: Sequence[Work], cost: Cost = SECOND, rows: int = 1) -> Fleet:
    return Fleet(Machine(cost, BLOCK, rows, 16), mode, works)


# --- formulas ---


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_row_at_a_time_is_m_d_1(busy: float) -> None:
    """Erlang's: the mean wait, and P(wait <= t) for t up to a service."""
    times = arrivals.poisson(busy, 60_000, 5)
    run = fleet(ONE, [Work(1, (1,), 1)]).run(times, [0] * len(times), 1)
    waits = np.array(run.whole) - 1.0
    assert waits.mean() == pytest.approx(busy / (2 * (1 - busy)), rel=0.06)
    for t in (0.001, 0.5, 0.999):
        assert (waits <= t).mean() == pytest.approx((1 - busy) * math.exp(busy * t), abs=0.015)
    assert run.busy == pytest.approx(busy, rel=0.03)
    assert run.first == run.whole, "answers of one token"


def test_random_replicas_are_as_many_queues() -> None:
    """Poisson's arrivals dealt at random are Poisson's again, so each replica is M/D/1."""
    times = arrivals.poisson(2.4, 60_000, 6)
    run = fleet(ONE, [Work(1, (1,), 1)]).run(times, [0] * len(times), 4, "random", seed=1)
    assert np.mean(run.whole) - 1.0 == pytest.approx(0.6 / (2 * 0.4), rel=0.06)


def test_by_hand() -> None:
    works = [Work(1, (1, 1, 1), 3), Work(20, (1, 1), 2)]
    # Two rows: the second's prompt takes two pieces of at most 16, the first row decodes between them.
    run = fleet(ONE, works, rows=2).run([0.0, 0.5], [0, 1], 1)
    # A's first token at 1, its second at 2; a piece of B's prompt at 3, A's last at 4; B's tokens at 5 and 6.
    assert run.first == (1.0, 4.5)
    assert run.whole == (4.0, 5.5)
    alone = fleet(ONE, works).run([0.0, 0.5], [0, 1], 1)
    assert alone.whole == (3.0, 5.5), "one row: B begins when A is over"
    assert fleet(ONE, works).run([0.0, 0.5], [0, 1], 2, "turns").whole == (3.0, 3.0)
    assert fleet(ONE, works, rows=2).run([0.0, 0.5], [0, 1], 2, "least").whole == (3.0, 3.0)


# --- the real loop ---


class Clocked(FakeBackend):
    """A fake whose steps take what a cost table says."""

    now = 0.0

    def step(self, cache, first, input_ids, kv_length, output_index, want_logits):  # type: ignore[no-untyped-def]
        self.now += RISING.of(input_ids.size)
        return super().step(cache, first, input_ids, kv_length, output_index, want_logits)


def is_right(at: int, masks: int) -> bool:
    """What the model predicts for place `at` behind so many masks: the next token itself is always right."""
    return masks == 0 or (7 * at + 3 * masks) % 5 != 0


def really(works: Sequence[Work], times: Sequence[float], config: GenerationConfig, rows: int) -> list[float]:
    """When each request ends, by the real loop."""
    lengths = {100 + i: work.prompt_tokens for i, work in enumerate(works)}

    def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
        at = len(known) + masks - lengths[known[0]]
        good = is_right(at, masks)
        return (5 + at % 7 if good or not config.exact else 90), (0.9 if good else 0.1)

    backend = Clocked(predict)
    schedule = Schedule(backend, BLOCK, MASK, Limits(rows, prefill_tokens=16))
    waiting = list(enumerate(zip(works, times, strict=True)))
    ends: dict[int, float] = {}
    while waiting or not schedule.is_idle:
        if schedule.is_idle:
            backend.now = max(backend.now, waiting[0][1][1])
        while waiting and waiting[0][1][1] <= backend.now:
            number, (work, _) = waiting.pop(0)
            prompt = [100 + number, *[3] * (work.prompt_tokens - 1)]
            schedule.add(Row(number, prompt, config.with_values(max_new_tokens=work.limit), (2,)))
        for events in schedule.forwards():
            for event in events:
                assert event.error is None
                if event.finish_reason is not None:
                    ends[event.row] = backend.now
    return [ends[i] for i in range(len(works))]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("mode", "config"),
    [
        (ONE, GenerationConfig(tau=1.0)),
        (TAU, GenerationConfig(tau=0.5, window="full")),
        (EXACT, GenerationConfig(window=BLOCK)),
    ],
)
def test_a_replica_is_the_real_loop(mode: Mode, config: GenerationConfig, rows: int) -> None:
    """Every request ends at the very second at which the real loop over the same predictions ends it."""

    def reach(at: int) -> int:
        return next((j for j in range(1, BLOCK) if not is_right(at + j, j)), BLOCK)

    sizes = [(1 + 5 * i % 14, 1 + 11 * i % 17) for i in range(40)]  # prompts of one piece: see ASSUMED
    works = [Work(p, tuple(reach(a) for a in range(n)), n) for p, n in sizes]
    times = arrivals.poisson(0.08 * rows, len(works), 3)
    masks = 0 if mode.one_token else BLOCK - 1
    replica = Replica(Machine(RISING, BLOCK, rows, 16), mode, [Shape(masks, masks)] * rows)
    replica.first_shape = Shape(0, masks)
    for number, (at, work) in enumerate(zip(times, works, strict=True)):
        replica.add(at, number, work)
    replica.run()
    assert [replica.ends[i][1] for i in range(len(works))] == pytest.approx(
        really(works, times, config, rows), abs=1e-9
    )


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    words = ("hello", "the cat", "one two three", "in the end", "an apple", "er")
    return [Task((Message("user", w),), "agreement", None, 6 + 7 * i) for i, w in enumerate(words)]


def test_recorded_work_takes_the_forwards_of_a_decode(sessions: Sessions, tasks: Sequence[Task]) -> None:
    session = sessions("qwen2")
    block, eos = session.bundle.manifest.block, session.bundle.manifest.tokens.eos
    traces = list(record(session, tasks, 4))

    def forwards(mode: Mode, work: Work) -> int:
        row, count = Walker(work, mode.exact), 1
        masks = 0 if mode.one_token else block - 1
        row.step(Shape(0, masks), 0)
        while not row.is_done:
            row.step(Shape(masks, masks))
            count += 1
        return count

    for task, trace in zip(tasks, traces, strict=True):
        limit = task.max_new_tokens
        for tau in (0.9, 0.4, 0.1, 0.0):
            mode = Mode("tau", False, tau)
            work = work_of(trace, mode, eos, limit)
            assert forwards(mode, work) == walk(trace, "probability", tau, eos, limit).forwards
        assert forwards(ONE, work_of(trace, ONE, eos, limit)) == len(trace.outcome.token_ids)
        done = session.generate(task.prompt, GenerationConfig(window=block, max_new_tokens=limit))
        assert forwards(EXACT, work_of(trace, EXACT, eos, limit)) == done.stats.forwards
    with pytest.raises(CalibrationError, match="does not put out surprise"):
        work_of(traces[0], Mode("x", False, 0.5, "surprise"), eos, 9)


# --- choices ---


def test_a_feed_is_as_wide_as_it_pays() -> None:
    always, never = [Work(4, (BLOCK,) * 40, 40)], [Work(4, (1,) * 40, 40)]
    dear = Cost(((1, 1.0), (64, 64.0)))
    assert best_shapes(never, TAU, BLOCK, 2, dear) == [Shape(0, 0)] * 2
    assert best_shapes(never, EXACT, BLOCK, 1, dear) == [Shape(0, 0)]
    assert best_shapes(always, TAU, BLOCK, 1, SECOND) == [Shape(0, BLOCK - 1)]
    assert best_shapes(always, EXACT, BLOCK, 1, SECOND)[0] == Shape(BLOCK - 1, BLOCK - 1)
    assert best_shapes(always, ONE, BLOCK, 3, SECOND) == [Shape(0, 0)] * 3
    assert widest(EXACT, BLOCK).masks == BLOCK + 1


@pytest.mark.parametrize("balance", BALANCES)
def test_more_replicas_are_no_slower_and_a_seed_is_a_run(balance: Balance) -> None:
    works = [Work(10, (2,) * n, n) for n in (5, 20, 60)]
    some = fleet(TAU, works, RISING, rows=4)
    times = arrivals.poisson(0.5, 800, 1)
    order = arrivals.order(3, 800, 1)
    tails = [some.run(times, order, n, balance, 1, skip=80).p95 for n in (4, 6, 9, 14, 30)]
    assert all(b <= a for a, b in pairwise(tails)), tails
    assert tails[-1] < tails[0] / 1.5
    assert some.run(times, order, 4, balance, 1) == some.run(times, order, 4, balance, 1)
    other = arrivals.poisson(0.5, 800, 2)
    assert some.run(other, order, 4, balance, 1) != some.run(times, order, 4, balance, 1)


def test_the_fewest_are_what_counting_up_finds() -> None:
    works = [Work(10, (2,) * n, n) for n in (5, 20, 60)]
    some = fleet(TAU, works, RISING, rows=2)
    times, order = arrivals.poisson(0.6, 600, 1), arrivals.order(3, 600, 1)
    runs = {n: some.run(times, order, n, "least") for n in range(1, 41)}
    bounds = [runs[40].p95 * factor for factor in (1.0, 1.1, 1.5, 3.0)]
    for p95 in bounds:
        wanted = next(n for n in runs if runs[n].p95 <= p95)
        assert fewest(lambda n: runs[n], p95, 1, 40)[0] == wanted
    assert fewest(lambda n: runs[n], 0.001, 1, 40) == (40, runs[40])


def test_options_tell_all_that_is_wrong() -> None:
    with pytest.raises(CalibrationError) as found:
        PlanOptions(p95=0, batches=(0,), balance="x", replicas=5000, requests=1)  # type: ignore[arg-type]
    for word in (
        "a rate or a trace",
        "p95 must",
        "batches must",
        "balance must",
        "replicas must",
        "requests",
    ):
        assert word in str(found.value)
    with pytest.raises(CalibrationError, match="rate must be above 0"):
        PlanOptions(p95=1, rate=math.nan)


def test_a_trace_file(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("# seconds\n12.5\n10 # first\n\n1e1\n")
    assert arrivals.read(tmp_path / "good") == [0, 0, 2.5]
    (tmp_path / "bad").write_text("1\nnan\nx\n")
    with pytest.raises(CalibrationError, match=r"(?s)line 2: 'nan'.*line 3: 'x'"):
        arrivals.read(tmp_path / "bad")
    (tmp_path / "short").write_text("1\n")
    with pytest.raises(CalibrationError, match="a trace has 2 to"):
        arrivals.read(tmp_path / "short")
    with pytest.raises(CalibrationError, match="cannot be read"):
        arrivals.read(tmp_path / "none")


# --- whole ---


@pytest.fixture
def shell(bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    monkeypatch.chdir(tmp_path)
    row = {"answer": "", "score": "contains", "max_new_tokens": 8}
    lines = [{"messages": [{"role": "user", "content": w}], **row} for w in ("hello", "the cat", "one")]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ("plan", bundles("qwen2"), "-t", "words.jsonl", "--threads", 1, "--batch", "1,4")


def test_from_the_shell(shell: tuple[object, ...], tmp_path: Path) -> None:
    arguments = (*shell, "--rate", 0.001, "--p95", 1000, "--requests", 200, "--modes", "exact,tau=0.5")
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert [(o["mode"], o["batch"]) for o in value["offers"]] == [
        ("exact", 1), ("exact", 4), ("tau 0.5", 1), ("tau 0.5", 4),
    ]  # fmt: skip
    assert value["chosen"]["replicas"] == 1
    assert value["chosen"]["mode"] == "exact", "with as many replicas exact mode comes first"
    assert all(o["keeps"] and o["p50"] <= o["p95"] <= o["p99"] for o in value["offers"])
    assert value["slower"] >= 1
    assert value["num_rows"] == 3
    assert any("machine like this one" in text for text in value["assumptions"])
    state = next((tmp_path / "plan-words-qwen2").glob("state-*.jsonl"))
    before = state.read_bytes()
    again = json.loads(run(*arguments, "--json").stdout)
    assert again | {"notes": []} == value | {"notes": []}, "one seed, one plan"
    assert state.read_bytes() == before, "what is recorded is not recorded again"
    shown = run(*arguments)
    assert "1 replica of" in shown.stdout
    assert "what is assumed" in shown.stdout
    assert "--max-rows" in shown.stdout


def test_what_cannot_be_kept_ends_with_1(shell: tuple[object, ...], tmp_path: Path) -> None:
    done = run(*shell, "--rate", 1, "--p95", 1e-9, "--requests", 200)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "nothing here keeps a p95 of 1e-09 s" in text
    assert "even alone p95 is" in text
    given = run(*shell, "--rate", 1e7, "--p95", 1000, "--requests", 200, "--replicas", 1)
    assert given.returncode == 1
    assert "1 replica cannot keep" in given.stdout
    few = run(*shell, "--rate", 1e9, "--p95", 1000, "--requests", 200, "--json")
    assert few.returncode == 1
    assert "only to answer them all takes" in few.stdout
    (tmp_path / "times").write_text("0\n5\n10\n")
    assert run(*shell, "--trace", "times", "--p95", 1000).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "give one of them"),
        (("--rate", 1, "--trace", "x"), 2, "give one of them"),
        (("--trace", "x"), 1, "x: cannot be read"),
        (("--rate", -1), 1, "rate must be above 0"),
        (("--rate", 1, "--batch", "x"), 1, "--batch must be whole numbers"),
        (("--rate", 1, "--balance", "x"), 1, "balance must be one of least, random, turns"),
        (("--rate", 1, "--modes", "fast"), 1, "'fast' is no mode"),
        (("--rate", 1, "--modes", "profile=none"), 1, "no profile `none`"),
    ],
)
def test_wrong_use(shell: tuple[object, ...], words: tuple[object, ...], code: int, message: str) -> None:
    done = run(*shell, "--p95", 1, *words)
    assert done.returncode == code
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_modes_have_names(sessions: Sessions) -> None:
    session = sessions("qwen2")
    assert modes_of(session, ()) == [Mode("exact", True)]
    assert [m.name for m in modes_of(session, ("exact", "one-token", "margin=0.2", "tau=0.9"))] == [
        "exact", "one token", "margin 0.2", "tau 0.9",
    ]  # fmt: skip


def test_the_record_pass_is_what_a_plan_rests_on(bundles: Named, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "answer": "", "score": "contains"}\n')
    options = PlanOptions(p95=10, rate=1, requests=100, draws=1, batches=(1,))
    request = PlanRequest(bundles("qwen2"), str(tmp_path / "rows.jsonl"), tmp_path / "out", options=options)
    report = plan(request)
    assert report.prompt_tokens > 0
    assert report.answer_tokens > 0
    assert report.cost[-1][0] > 128, "a piece of a prompt is within the table"
