"""The side-by-side benchmark's own parts: the line protocol against a fake peer, medians, tables, goals and
the merged file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT
from support.tiny import Named

from mars_export.calibration.tasks.tasks import Task
from mars_export.exporter.checkpoint.tensors import SafetensorsFile
from peers import catalog, goals, measure, ours, tensors_file, turns
from peers.catalog import Entry
from peers.measure import Round, Summary
from peers.process import PeerError, Process
from peers.protocol import Reply, Request
from peers.resident import Resident
from peers.rounds import run_round
from peers.rows import Prompts

FAKE = [sys.executable, str(ROOT / "tests" / "support" / "fake_peer.py")]
REQUEST = Request([[5, 6, 7]], [2], [0], 1, {})
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start fake peers that are closed at the end."""
    started: list[Process] = []

    def begin(**options: Any) -> Process:
        started.append(Process(FAKE, options, tmp_path / "peer.log"))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_a_peer_answers_over_the_line_and_its_prints_are_no_replies(start: Start, tmp_path: Path) -> None:
    peer = start()
    assert peer.versions == "fake 1"
    assert peer.answer(REQUEST) == Reply([[5, 6]], 2.0, 0.5, 1, 2)
    peer.close()
    peer.close()  # closing twice is fine
    assert "a library that prints" in (tmp_path / "peer.log").read_text()


def test_a_peer_that_fails_to_answer_says_why_and_answers_again(start: Start) -> None:
    peer = start(fails="answer")
    for _ in range(2):
        with pytest.raises(PeerError, match="ValueError: a bad prompt"):
            peer.answer(REQUEST)


@pytest.mark.parametrize(
    ("fails", "message"), [("exit", "exit code 3"), ("sleep", r"no answer within 0.2 s")]
)
def test_a_peer_that_dies_or_hangs(start: Start, fails: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        start(fails=fails).answer(REQUEST, timeout=0.2 if fails == "sleep" else 30)


def test_a_peer_that_does_not_load_or_start(start: Start, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"FileNotFoundError: no model; see .*peer.log"):
        start(fails="load")
    with pytest.raises(PeerError, match="does not start"):
        Process([str(tmp_path / "nothing")], {}, tmp_path / "log")
    with pytest.raises(PeerError, match="no JSON object"):
        Process([sys.executable, "-c", "input(); print('hello')"], {}, tmp_path / "log")


class Scripted:
    """A process without a process; `fails` makes its second answer fail."""

    def __init__(self, asked: list[str], name: str, fails: bool = False) -> None:
        self.asked, self.name, self.fails, self.count = asked, name, fails, 0

    def answer(self, request: Request) -> Reply:
        self.count += 1
        self.asked.append(f"{self.name}{request.prompts[0][0]}")
        if self.fails and self.count == 2:
            raise PeerError("broken")
        return Reply(request.prompts, 1.0, 0.25, 1, None)


def test_what_a_process_has_in_memory_is_its_own_or_of_files(start: Start) -> None:
    process = start()
    seen = Resident.of(process.pid)
    assert 1 < seen.own < seen.own + seen.files <= seen.peak + 1 < 1000
    process.close()
    with pytest.raises(OSError):
        Resident.of(process.pid)


def prompts(count: int) -> Prompts:
    rows = tuple(Task((), "exact_match", "", 4, text="x") for _ in range(count))
    # type: ignore[arg-type]
    return Prompts("task", rows, tuple((i, 9) for i in range(count)), (0,), 1, text=None)


def test_a_round_goes_row_by_row_and_drops_what_fails() -> None:
    asked: list[str] = []
    entries = [Entry(name, name, "peer") for name in "abc"]
    processes = {name: Scripted(asked, name, fails=name == "b") for name in "abc"}
    made, failed = run_round(entries, processes, prompts(3), 1, lambda text: None)
    assert asked == ["b0", "c0", "a0", "b1", "c1", "a1", "c2", "a2"]
    assert failed == {"b": "broken"}
    assert made.keys() == {"a", "c"}
    assert made["a"].answers == ((0, 9), (1, 9), (2, 9))
    assert (made["a"].tokens, made["a"].seconds, made["a"].forwards) == (6, 3.0, None)


def test_batches_are_groups_of_rows_the_last_one_smaller() -> None:
    asked: list[str] = []
    made, _ = run_round(
        [Entry("a", "a", "ours", batch=2)], {"a": Scripted(asked, "a")}, prompts(3), 0, lambda text: None
    )
    assert asked == ["a0", "a2"] and made["a"].answers == ((0, 9), (1, 9), (2, 9))


def a_round(seconds: float, tokens: int = 10) -> Round:
    return Round(((1, 2), (3, 0)), tokens, seconds, (0.5, 1.5), 2, 5)


def test_a_summary_is_of_medians() -> None:
    rounds = [a_round(4.0), a_round(10.0), a_round(6.0)]
    summary = measure.summarize("x", "peer", "task", 1, rounds, 0.5, ((1, 2), (3, 4)))
    assert summary.tokens_per_second == pytest.approx(10 / 6)
    assert summary.decode_tokens_per_second == pytest.approx(8 / 4)
    assert summary.ttft_ms == pytest.approx(1000)
    assert (summary.tokens_per_forward, summary.mean_tokens, summary.equal, summary.accuracy) == (
        2.0,
        5.0,
        0.5,
        0.5,
    )


def test_rates_of_no_time_are_zero_and_unknowns_are_shown_as_such() -> None:
    nothing = Round(((),), 0, 0.0, (0.0,), 0, None)
    summary = measure.summarize("x", "peer", "task", 1, [nothing], 0.0, None)
    assert (summary.tokens_per_second, summary.decode_tokens_per_second, summary.tokens_per_forward) == (
        0.0,
        0.0,
        None,
    )
    assert measure.table([summary]).splitlines()[-1] == "| x | 0.0 | 0.0 | 0 | - | 0.0 | 0% | - |"


def summary(label: str, rate: float, batch: int = 1, task: str = "assistant") -> Summary:
    kind = "ours" if label.startswith("ours") else "peer"
    return Summary(label, kind, task, batch, 1, rate, rate, 1.0, 1.0, 10.0, 1.0, 1.0)


def test_the_table_has_a_block_for_each_task_and_batch_fastest_first() -> None:
    text = measure.table([summary("slow", 1), summary("fast", 2), summary("ours fp32 tau 1", 3, batch=4)])
    assert (
        text.index("assistant, batch 1")
        < text.index("| fast")
        < text.index("| slow")
        < text.index("assistant, batch 4")
    )


def test_goals_compare_the_fastest_of_both_sides_and_leave_out_what_is_absent() -> None:
    single = [
        summary("ours fp32 tau 1", 10),
        summary("ours fp32 tau 0.95", 24),
        summary("ours int4 tau 0.95", 40),
        summary("ours w8a8 tau 1", 16),
    ]
    found = {
        g.what: g for g in goals.goals([*single, summary("genai int4", 19), summary("transformers fp32", 0)])
    }
    assert found["quantized MARS over our fastest one-token mode"].ratio == pytest.approx(2.5)
    assert found["quantized MARS over the fastest 4-bit peer"].met
    assert found["fp32 MARS over our one-token mode in fp32"].ratio == pytest.approx(2.4)
    assert found["fp32 MARS over transformers"].ratio == 0.0  # a rate of zero is no rate
    assert "fp32 MARS over the authors' cached sampler" not in found
    assert goals.goals([]) == []
    [goal] = [g for g in goals.goals([*single, summary("ours fp32 exact", 18)]) if "exact" in g.what]
    assert (goal.theirs, goal.ratio, goal.met) == ("ours fp32 tau 0.95", 0.75, False)


def test_batch_goals_are_of_one_bundle_each() -> None:
    rows = [
        *(
            summary(f"ours fp32 tau {tail}", rate, 8)
            for tail, rate in [("1", 10), ("0.95 cursor", 20), ("0.95 block 8", 12), ("0.95 block 16", 16)]
        ),
        summary("ours w8a8 tau 1", 100, 8),
    ]
    found = goals.goals(rows)
    exact = goals.goals([*rows, summary("ours fp32 exact", 19, 8), summary("ours w8a8 exact", 90, 8)])
    assert exact[:2] == found, "the others are as they were"
    assert [(g.ratio, g.wanted, g.ours, g.theirs) for g in exact[2:]] == [
        (0.95, 0.9, "ours fp32 exact", "ours fp32 tau 0.95 cursor")
    ]
    assert [(g.ratio, g.wanted, g.theirs) for g in found] == [
        (1.25, 1.15, "ours fp32 tau 0.95 block 16"),
        (2.0, 1.60, "ours fp32 tau 1"),
    ]
    assert "| yes |" in goals.lines(found)


def test_every_entry_names_a_program() -> None:
    programs = [p.name for p in catalog.programs(Path("w"), Path("v"), Path("a"))]
    entries = catalog.single_entries(programs)
    assert len({e.label for e in entries}) == len(entries) and {e.program for e in entries} == set(programs)
    assert {e.batch for e in catalog.batch_entries(["ours fp32"])} == set(catalog.BATCHES)
    assert [e.kind for e in entries].count("authors") == 2
    assert replace(entries[0]).settings == {"tau": 1.0}
    assert [e.label for e in entries if e.program == "ours w8a8"] == [
        "ours w8a8 tau 1", "ours w8a8 tau 0.95", "ours w8a8 exact"
    ]  # fmt: skip
    assert {e.batch for e in catalog.batch_entries(["ours fp32"]) if e.label == "ours fp32 exact"} == set(
        catalog.BATCHES
    )


def test_ours_answers_at_every_entry(bundles: Named) -> None:
    answer, versions = ours.load({"model": str(bundles("qwen2")), "threads": 1})
    assert "onnxruntime" in versions
    entries = [*catalog.single_entries(["ours fp32"]), *catalog.batch_entries(["ours fp32"])]
    replies = {
        (e.batch, e.label): answer(Request([[5, 6, 7], [8, 9]], [6, 9], [0], 1, dict(e.settings)))
        for e in entries
    }
    one = replies[1, "ours fp32 tau 1"].token_ids
    exact = [reply.token_ids for (_, label), reply in replies.items() if label.endswith(" exact")]
    assert exact == [one] * (1 + len(catalog.BATCHES)), "exact mode gives the one-token text"
    assert all(reply.forwards for reply in replies.values())


def test_a_tensors_file_reads_back(tmp_path: Path) -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    numbers = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()
    }
    tensors_file.write(tmp_path / "x.safetensors", shapes, np.dtype(np.float32), numbers.__getitem__)
    read = SafetensorsFile(tmp_path / "x.safetensors")
    assert read.shapes == shapes and all((read.read(name) == numbers[name]).all() for name in shapes)


def test_wrong_usage_is_explained(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *words],
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("--help").returncode == 0
    for words, message in [
        (("--rounds", "0"), "--rounds must be positive"),
        (("--authors", str(tmp_path)), "no mars/samplers there"),
        (("--setup", "nobody"), "invalid choice"),
    ]:
        done = run(*words)
        assert done.returncode == 2 and message in done.stderr, json.dumps(done.stderr)


def test_turns_are_histories_that_begin_otherwise_and_their_second_turns() -> None:
    asked: dict[str, list[Request]] = {"ours fp32": [], "llama.cpp q8_0": []}

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, request: Request) -> Reply:
            asked[self.name].append(request)
            [ids], [limit] = request.prompts, request.limits
            return Reply([[7] * limit], 9.0, 0.002 * len(ids), 1)

    prompts = Prompts("t", (), tuple((1, 2, 3, *range(i, i + 60)) for i in (9, 40)), (0,), 5, None)  # type: ignore[arg-type]
    processes = {name: Noting(name) for name in (*asked, "genai fp32")}
    found = turns.measure(processes, prompts, 200, 3)
    assert list(found) == ["ours fp32", "llama.cpp q8_0"]
    for name, requests in asked.items():
        assert len(requests) == 8, "a round to warm up, and three"
        firsts, seconds = requests[::2], requests[1::2]
        for one, two in zip(firsts, seconds, strict=True):
            assert (len(one.prompts[0]), one.limits, two.limits) == (200, [turns.ANSWER], [1])
            assert two.prompts[0][:232] == one.prompts[0] + [7] * 32
            assert len(two.prompts[0]) == 232 + turns.QUESTION
        assert len({tuple(one.prompts[0][:2]) for one in firsts}) == 4, "no round is a hit of another"
        assert [r.settings for r in requests] == [{} if name.startswith("ours") else {"keep": True}] * 8
    assert found["ours fp32"].to_dict() == pytest.approx(
        {"first_turn_s": 0.4, "second_turn_s": 0.524, "rounds": 3}
    )
    assert turns.table(found).splitlines()[-1] == "| llama.cpp q8_0 | 0.400 | 0.524 | 1.310 |"
