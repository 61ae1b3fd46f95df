"""What a step costs: the table, its measurement with a scripted clock, and the file that keeps it, hostile
ones included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake import MASK, FakeBackend

from mars_export import GenerationConfig, Session
from mars_export.runtime.decode.speculation.cost import MAX_SECONDS, Cost, measure
from mars_export.runtime.session.cost_file import CostFile

TABLE = Cost(((1, 10.0), (2, 9.0), (4, 20.0), (8, 40.0)))


def test_between_points_it_is_linear_and_it_never_falls() -> None:
    assert [TABLE.of(n) for n in (0.5, 1, 2, 3, 4, 5, 8)] == [9, 9, 9, 14.5, 20, 25, 40]
    assert TABLE.of(16) == 80
    assert TABLE.of(2.5) == 11.75
    assert Cost(((4, 2.0),)).of(100) == 2.0


class Clock:
    """Each step takes what a table says, and sometimes far longer; the first step of a size is slow."""

    def __init__(self, backend: FakeBackend, seconds: Callable[[int, int], float]) -> None:
        self.backend, self.seconds = backend, seconds

    def __call__(self) -> float:
        seen: dict[int, int] = {}
        total = 0.0
        for step in self.backend.steps:
            seen[step.slots] = seen.get(step.slots, 0) + 1
            total += self.seconds(step.slots, seen[step.slots])
        return total


def unsure(*_: object) -> tuple[int, float]:
    return 1, 0.5


class Zeros(FakeBackend):
    """A fake whose KV memory holds something from the start, as a real one's does."""

    def new_cache(self, num_rows: int):  # type: ignore[no-untyped-def]
        cache = super().new_cache(num_rows)
        cache.reserve(1000)
        cache.entries[:] = 5
        return cache


def test_the_least_of_some_rounds_after_a_warm_up() -> None:
    backend = Zeros(unsure)
    noise = {2: 9.0, 3: 0.0, 4: 1.0, 5: 2.0, 6: 0.5}
    cost = measure(
        backend,
        8,
        MASK,
        Clock(backend, lambda slots, nth: (100.0 if nth == 1 else slots + noise[nth]) / 1000),
    )
    assert [p for p, _ in cost.points] == [1, 2, 4, 8, 15, 32]
    assert all(math.isclose(seconds, slots / 1000) for slots, seconds in cost.points)
    assert all(step.output_index.shape[1] == step.slots for step in backend.steps), "as in exact mode"
    limited = Zeros(unsure)
    limited.max_outputs = 9
    measure(limited, 8, MASK)
    assert max(step.output_index.shape[1] for step in limited.steps) == 9


def test_a_slow_model_is_measured_once_and_a_clock_that_stands_still_is_survived() -> None:
    backend = Zeros(unsure)
    measure(backend, 4, MASK, Clock(backend, lambda slots, nth: MAX_SECONDS * 2))
    assert len(backend.steps) == 2 * len({step.slots for step in backend.steps})
    backend = Zeros(unsure)
    assert measure(backend, 4, MASK, lambda: 0.0).of(4) > 0


# --- the file ---

HOSTILE = [
    b"",
    b"{",
    b"[]",
    b'{"points": 3}',
    b'{"points": [[1]]}',
    b'{"points": [[1, NaN]]}',
    b'{"points": [[1, -1]]}',
    b'{"points": [[2, 1], [1, 1]]}',
    b'{"points": [[1' + b"0" * 5000 + b", 1]]}",
    b"[" * 10_000,
    b"\xff\xfe\x00",
    b" " * 100_000 + b'{"points": [[1, 1]]}',
]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = CostFile(tmp_path / "a" / "b" / "x.json")
    assert file.read() is None
    file.write(TABLE)
    assert file.read() == TABLE
    assert list(file.path.parent.iterdir()) == [file.path]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_bad_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    file = CostFile(tmp_path / "x.json")
    file.path.write_bytes(content)
    assert file.read() is None
    file.write(TABLE)
    assert file.read() == TABLE


def test_a_folder_that_cannot_be_written_or_is_no_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostFile(tmp_path / "file" / "x.json").write(TABLE)
    (tmp_path / "x.json").mkdir()
    CostFile(tmp_path / "x.json").write(TABLE)
    assert CostFile(tmp_path / "x.json").read() is None


def test_a_session_measures_once_keeps_the_table_and_reads_it(
    tmp_path: Path, sessions: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sessions("llama")
    measured = []
    busy: list[int] = []
    monkeypatch.setattr("mars_export.runtime.session.session.measure", lambda *_: measured.append(1) or TABLE)
    monkeypatch.setattr("mars_export.runtime.machine.is_busy", lambda: bool(busy))
    file = CostFile(tmp_path / "x.json")

    def fresh() -> Session:
        return Session(opened.bundle, opened.variant, opened.backend, file)

    session = fresh()
    for config in (GenerationConfig(tau=1.0, max_new_tokens=3), GenerationConfig(masks=2, max_new_tokens=3)):
        session.generate([5, 6], config)
        session.generate([5, 6], config)
    assert not measured
    for _ in range(2):
        session.generate([5, 6], GenerationConfig(tau=0.3, max_new_tokens=6))
    assert session.cost == fresh().cost == TABLE
    assert len(measured) == 1
    file.path.write_text("torn")
    assert fresh().cost == TABLE
    assert len(measured) == 2
    busy.append(1)
    file.path.unlink()
    for _ in range(2):  # measured each time, since such a table would make every later session slow
        assert fresh().cost == TABLE
    assert len(measured) == 4
    assert not file.path.exists()
    given = fresh()
    given.cost = Cost(((1, 5.0),))
    assert given.cost.of(1) == 5.0
    assert len(measured) == 4


def test_the_name_tells_machines_settings_and_graphs_apart(
    sessions: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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


def test_a_user_without_a_home_has_no_file(
    sessions: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    session = sessions("llama")
    assert CostFile.of(session.bundle, session.variant, "cpu", 1) is None
