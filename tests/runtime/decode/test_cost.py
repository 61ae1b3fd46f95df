"""What a step costs: the table, what is learned from steps, and its file, hostile ones included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.fixtures import Sessions

from mars_export import Batcher, GenerationConfig, Session
from mars_export.runtime.decode.speculation.cost import Cost, Learned, LearnedCost, built_in
from mars_export.runtime.session.cost_file import CostFile

RECORD = LearnedCost.record  # all other tests learn nothing
TABLE = Cost(((1, 10.0), (2, 9.0), (4, 20.0), (8, 40.0)))


def test_between_points_it_is_linear_and_it_never_falls() -> None:
    assert [TABLE.of(n) for n in (0.5, 1, 2, 3, 4, 5, 8)] == [9, 9, 9, 14.5, 20, 25, 40]
    assert TABLE.of(16) == 80
    assert TABLE.of(2.5) == 11.75
    assert Cost(((4, 2.0),)).of(100) == 2.0


def learned(seconds: Callable[[int, int], float], sizes: Sequence[int], earlier: LearnedCost) -> LearnedCost:
    """`earlier` after steps of one row with `sizes` slots; `seconds` of the slots and the step's number."""
    for n, slots in enumerate(sizes):
        RECORD(earlier, 1, slots, seconds(slots, n))
    return earlier


def fresh(*curve: tuple[int, float]) -> LearnedCost:
    return LearnedCost(Cost(curve or ((1, 1.0), (32, 2.0))))


def test_without_steps_it_is_the_curve_and_any_step_sets_the_scale() -> None:
    cost = fresh()
    assert cost.cost.of(1) == 1.0 and cost.cost.of(32) == 2.0
    learned(lambda *_: 0.01, [1, 1], cost)
    assert cost.cost.of(1) == 0.01 and cost.cost.of(32) == 0.02


def test_the_first_step_of_a_shape_is_left_out() -> None:
    cost = learned(lambda slots, n: 100.0 if n < 2 else slots / 1000, [1, 8, 1, 8, 1, 8], fresh())
    assert math.isclose(cost.cost.of(1), 0.001, rel_tol=0.1)
    assert math.isclose(cost.cost.of(8), 0.008, rel_tol=0.1)


def test_the_shape_of_a_machine_is_learned_and_sizes_between_follow_their_neighbours() -> None:
    cost = learned(lambda slots, _: 0.01 * slots, [1, 16] * 40, fresh())
    assert math.isclose(cost.cost.of(1), 0.01, rel_tol=0.01)
    assert math.isclose(cost.cost.of(16), 0.16, rel_tol=0.01)
    assert 0.01 < cost.cost.of(4) < 0.16
    assert cost.cost.of(8) > 0.08


def test_one_disturbed_step_changes_little() -> None:
    cost = learned(lambda _, n: 5.0 if n == 20 else 0.01, [1] * 22, fresh((1, 1.0)))
    assert cost.cost.of(1) < 0.0115


def test_a_bad_measurement_does_not_stay() -> None:
    """A size was slow for a while: it is corrected by its next steps, and forgotten if it never runs."""

    def seconds(slots: int, n: int) -> float:
        return 0.01 * (10 if slots == 8 and n < 40 else 1)

    burst = [1, 8] * 20
    cost = learned(seconds, burst, fresh((1, 1.0)))
    assert cost.cost.of(8) > 0.09
    again = learned(lambda *_: 0.01, [8] * 32, cost)
    assert again.cost.of(8) < 0.025
    cost = learned(seconds, burst + [1, 6, 12] * 1500, fresh((1, 1.0)))
    assert cost.cost.of(8) < 0.012


def test_a_clock_that_stands_still_is_survived() -> None:
    assert learned(lambda *_: 0.0, [1, 1, 4, 4], fresh()).cost.of(4) > 0


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_precision_has_a_curve_that_rises(precision: str, device: str) -> None:
    cost = built_in(precision, device)
    assert 0 < cost.of(1) < cost.of(16) < 16 * cost.of(1)


# --- the file ---

HOSTILE = [
    b"",
    b"{",
    b"[]",
    b'{"sizes": 3}',
    b'{"sizes": [[1]]}',
    b'{"sizes": [[1, NaN, 1]]}',
    b'{"sizes": [[1, -1, 1]]}',
    b'{"sizes": [[1, 1, 1e9]]}',
    b'{"sizes": [[5, 1, 1]]}',
    b'{"sizes": [[1' + b"0" * 5000 + b", 1, 1]]}",
    b"[" * 10_000,
    b"\xff\xfe\x00",
    b" " * 100_000 + b'{"sizes": [[1, 1, 1]]}',
]
LEARNED = (Learned(1, 0.5, 3.0), Learned(16, 0.1 + 0.2, 7.5))


def test_what_was_learned_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = CostFile(tmp_path / "a" / "b" / "x.json")
    assert file.read() == ()
    file.write(LEARNED)
    assert file.read() == LEARNED
    assert LearnedCost(Cost(((1, 1.0),)), file.read()).learned == LEARNED
    assert list(file.path.parent.iterdir()) == [file.path]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_bad_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    file = CostFile(tmp_path / "x.json")
    file.path.write_bytes(content)
    assert file.read() == ()
    file.write(LEARNED)
    assert file.read() == LEARNED


def test_a_folder_that_cannot_be_written_or_is_no_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostFile(tmp_path / "file" / "x.json").write(LEARNED)
    (tmp_path / "x.json").mkdir()
    CostFile(tmp_path / "x.json").write(LEARNED)
    assert CostFile(tmp_path / "x.json").read() == ()


def test_a_session_learns_from_the_steps_that_run_and_keeps_it_for_the_next(
    tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LearnedCost, "record", RECORD)
    opened = sessions("llama")
    file = CostFile(tmp_path / "costs" / "x.json")
    session = Session(opened.bundle, opened.variant, opened.backend, file)
    assert session.cost == session.step_costs.cost
    session.generate([5, 6], GenerationConfig(tau=1.0, max_new_tokens=12))
    assert [size.positions for size in session.step_costs.learned] == [1], "steps of any request"
    assert not file.path.exists(), "too little to be worth it"
    session.generate([5, 6], GenerationConfig(tau=1.0, max_new_tokens=12))
    saved = file.read()
    assert [size.positions for size in saved] == [1]
    later = Session(opened.bundle, opened.variant, opened.backend, file)
    assert later.step_costs.learned == saved
    assert later.cost.of(1) < 0.5, "in seconds of this machine; the curve of the tests says 1"
    later.cost = Cost(((1, 5.0),))
    assert later.cost.of(1) == 5.0


def test_no_step_runs_but_those_of_the_answer(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = sessions("llama")
    session, steps = Session(opened.bundle, opened.variant, opened.backend), []
    real = opened.backend.step
    monkeypatch.setattr(opened.backend, "step", lambda *a: steps.append(1) or real(*a))
    Batcher(session).close()
    assert not steps
    stats = session.generate([5, 6], GenerationConfig(tau=0.3, max_new_tokens=6)).stats
    assert len(steps) == stats.forwards + stats.prefill_forwards


def test_the_name_tells_machines_settings_and_graphs_apart(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llama, qwen = sessions("llama"), sessions("qwen3")
    files = [
        CostFile.of(s.bundle, s.variant, device, threads)
        for s in (llama, qwen)
        for device, threads in (("cpu", 1), ("cpu", None), ("cuda", 1))
    ]
    monkeypatch.setattr("mars_export.runtime.machine.processor", lambda: "another")
    files.append(CostFile.of(llama.bundle, llama.variant, "cpu", 1))
    monkeypatch.setattr("mars_export.runtime.machine.gpus", lambda: ["another"])
    files.append(CostFile.of(llama.bundle, llama.variant, "cuda", 1))
    paths = {file.path for file in files if file is not None}
    assert len(paths) == len(files)
    assert all(path.is_relative_to(tmp_path) for path in paths)


def test_a_user_without_a_home_has_no_file(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    session = sessions("llama")
    assert CostFile.of(session.bundle, session.variant, "cpu", 1) is None
