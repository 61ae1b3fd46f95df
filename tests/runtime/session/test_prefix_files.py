"""Prefix cache entries in files: a restart finds them, and nothing else is taken for them."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from support.fixtures import Exported
from support.paths import ROOT
from support.prefix_files import Twin, form, stored
from support.prefixes import PLENTY
from support.reproducible import reproducible

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.session.prefix_dir import PrefixFormat

IDS = list(range(1, 21))
FILE = BytesIO()
form().write(next(iter(stored([IDS]).entries)), FILE)
SIZE = len(FILE.getvalue())  # of an entry of 20 ids
CONFIG = GenerationConfig(max_new_tokens=6, eos_ids=())


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_a_restart_finds_what_was_saved(tmp_path: Path) -> None:
    first = Twin(tmp_path / "a" / "b")
    first.save(IDS, "salt", fixed=True)
    first.save([7, 8, 9])
    second = Twin(tmp_path / "a" / "b")
    assert [second.length(IDS, "salt"), second.length([7, 8, 9]), second.length(IDS)] == [20, 3, 0]
    assert [entry.fixed for entry in second.store.entries] == [True, False]
    assert {os.stat(file).st_mode & 0o777 for file in (tmp_path / "a" / "b").iterdir()} == {0o600}


def test_a_longer_entry_replaces_the_file_of_its_beginning(tmp_path: Path) -> None:
    twin = Twin(tmp_path)
    twin.save(IDS[:5])
    twin.save(IDS)
    assert len(names(tmp_path)) == 1
    assert Twin(tmp_path).length(IDS) == 20


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    twin = Twin(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        twin.save([number] * 20)
    assert twin.length([1] * 20) == 20  # is used again
    twin.dir.wait()
    twin.save([4] * 20)
    again = Twin(tmp_path)
    assert [again.length([number] * 20) for number in (1, 2, 3, 4)] == [20, 0, 20, 20]
    twin.save([5] * 200)
    assert len(names(tmp_path)) == 3, "what is larger than the budget removes nothing"


def test_only_what_fits_in_memory_is_loaded_the_latest_first(tmp_path: Path) -> None:
    twin = Twin(tmp_path)
    for number in (1, 2, 3):
        twin.save([number] * 20)
    small = Twin(tmp_path, memory=2 * SIZE)
    assert [small.length([number] * 20) for number in (1, 2, 3)] == [0, 20, 20]


def test_entries_of_another_model_stay_and_are_not_used(tmp_path: Path) -> None:
    Twin(tmp_path, fingerprint="0" * 32).save(IDS)
    other = Twin(tmp_path, fingerprint="1" * 32)
    assert other.length(IDS) == 0
    assert Twin(tmp_path, fingerprint="0" * 32).length(IDS) == 20


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    [file] = path.glob("prefix-*")
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: data.replace(b'"fixed": false', b'"fixed": true '),
        lambda data: b"[" * 60_000 + data,
        lambda _: b"",
    ],
)
def test_damaged_files_are_removed_and_written_again(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    Twin(tmp_path).save(IDS)
    changed(tmp_path, change)
    twin = Twin(tmp_path)
    assert (twin.length(IDS), names(tmp_path)) == (0, [])
    twin.save(IDS)
    assert Twin(tmp_path).length(IDS) == 20


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.EMFILE, "Too many open files"), PermissionError(errno.EACCES, "no")],
)
def test_a_file_that_cannot_be_read_now_stays(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    Twin(tmp_path).save(IDS)
    with monkeypatch.context() as patch:
        patch.setattr(np, "load", fails)
        assert Twin(tmp_path).length(IDS) == 0
    assert Twin(tmp_path).length(IDS) == 20


def test_a_damaged_file_that_cannot_be_removed_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    Twin(tmp_path).save(IDS)
    changed(tmp_path, lambda data: data[:-1])
    monkeypatch.setattr(Path, "unlink", denied)
    assert Twin(tmp_path).length(IDS) == 0


def test_a_file_of_another_version_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mars_export.runtime.session.prefix_dir.VERSION", 9)
        Twin(tmp_path).save(IDS)
    assert (Twin(tmp_path).length(IDS), names(tmp_path)) == (0, [])


def test_foreign_files_stay(tmp_path: Path) -> None:
    Twin(tmp_path).save(IDS)
    for name in ("notes.txt", "prefix-1.npz"):
        (tmp_path / name).write_text("mine")
    twin = Twin(tmp_path, SIZE)
    twin.save([9] * 20)
    left = names(tmp_path)
    assert left[:2] == ["notes.txt", "prefix-1.npz"]
    assert len(left) == 3, "and one entry, the new one"


def test_a_full_disk_costs_the_entry_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: PrefixFormat, _entry: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    twin = Twin(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixFormat, "write", full)
        twin.save(IDS)
    assert names(tmp_path) == []
    assert twin.length(IDS) == 20, "the memory has it"
    twin.dir.wait()
    assert Twin(tmp_path).length(IDS) == 20, "written when it was used again"


PROGRAM = """
import os, random, sys
from pathlib import Path
from support.prefix_files import Twin
from mars_export.runtime.session.prefix_dir import PrefixFormat
path, seed, is_killed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "killed"
real = PrefixFormat.write
def write(self, entry, file):
    real(self, entry, file)
    if is_killed:
        os.kill(os.getpid(), 9)
PrefixFormat.write = write
draw, twin = random.Random(seed), Twin(path, 6 * int(sys.argv[4]))
for _ in range(150):
    twin.save([draw.randrange(1, 12)] * 20)
    twin.length([draw.randrange(1, 12)] * 20)
"""


def start(path: Path, seed: int, how: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", PROGRAM, str(path), str(seed), how, str(SIZE)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_and_one_that_is_killed(tmp_path: Path) -> None:
    """All share one directory, and remove each other's files. What is left is whole and within the budget."""
    killed = start(tmp_path, 0, "killed")
    assert killed.wait(300) == -9
    assert [name for name in names(tmp_path) if not name.endswith(".npz")], "it left half a file"
    both = [start(tmp_path, seed, "ends") for seed in (1, 2)]
    for process in both:
        _, said = process.communicate(timeout=300)
        assert (process.returncode, said) == (0, "")
    left = names(tmp_path)
    twin = Twin(tmp_path, memory=PLENTY)
    assert len(twin.store.entries) == len(left) > 2, "the half file went first, all others are whole"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 8 * SIZE, "one more for each process"


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="cannot be used as a prefix directory"):
        Twin(tmp_path / "file")


# --- over ONNX Runtime ---


@pytest.fixture(scope="module", params=["fp32", "int8", "w8a8 kv8"])
def bundle(request: pytest.FixtureRequest, exported: Exported) -> Path:
    return reproducible(exported, request.param)


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    system = [draw.randrange(250) for _ in range(300)]
    return [[*system, *(draw.randrange(250) for _ in range(draw.randint(1, 40)))] for _ in range(4)]


def test_answers_after_a_restart_are_those_without_files(bundle: Path, tmp_path: Path) -> None:
    plain = Session.open(bundle, threads=1, cache_bytes=0)
    for round_ in range(2):
        session = Session.open(bundle, threads=1, cache_bytes=PLENTY, prefix_dir=tmp_path)
        for prompt in prompts(1):
            had, wanted = session.generate(prompt, CONFIG), plain.generate(prompt, CONFIG)
            assert (had.token_ids, had.confidences) == (wanted.token_ids, wanted.confidences)
            assert had.stats.cached_tokens >= 250 * round_
        session._prefixes.copies.wait()  # type: ignore[union-attr]


def test_nonsense_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="prefix_bytes must be 0 or more"):
        Session.open(bundle, prefix_dir=tmp_path, prefix_bytes=-1)
    with pytest.raises(SessionError, match="needs a prefix cache"):
        Session.open(bundle, prefix_dir=tmp_path, cache_bytes=0)


def test_entries_of_bfloat16_are_bits(tmp_path: Path) -> None:
    twin = Twin(tmp_path, dtype=np.dtype("<u2"))
    twin.save(IDS)
    assert Twin(tmp_path, dtype=np.dtype("<u2")).length(IDS) == 20
