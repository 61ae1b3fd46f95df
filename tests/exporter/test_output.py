"""Writing a bundle: the hash of a file is what reading it back would give, and a full disk loses nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mars_export.exporter.output import writing
from mars_export.runtime.bundle.files import MANIFEST_FILE
from mars_export.runtime.errors import ExportError


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, ExportError), (errno.EIO, OSError)])
def test_a_disk_that_fills_up_is_said_and_the_old_bundle_stays(
    number: int, error: type[Exception], tmp_path: Path
) -> None:
    old = tmp_path / "old.bundle"
    old.mkdir()
    (old / MANIFEST_FILE).write_text("{}")
    with pytest.raises(error, match=os.strerror(number)), writing(old, 0, force=True) as scratch:
        fail(scratch, number)
    assert [path.name for path in tmp_path.rglob("*")] == ["old.bundle", MANIFEST_FILE]


def bundle(path: Path, text: str) -> Path:
    path.mkdir()
    (path / MANIFEST_FILE).write_text(text)
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_forced_bundle_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    with writing(old, 0, force=True) as scratch:
        (scratch / MANIFEST_FILE).write_text("new")
        assert (old / MANIFEST_FILE).read_text() == "old"
    assert (old / MANIFEST_FILE).read_text() == "new"
    assert names(tmp_path) == ["a.bundle"]


def test_a_rename_that_fails_puts_the_old_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    real, calls = os.rename, []

    def fails_once(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", fails_once)
    with (
        pytest.raises(ExportError, match="An earlier bundle is unchanged"),
        writing(old, 0, force=True) as scratch,
    ):
        (scratch / MANIFEST_FILE).write_text("new")
    assert (old / MANIFEST_FILE).read_text() == "old"
    assert names(tmp_path) == ["a.bundle"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    bundle(tmp_path / ".a.bundle.partial", "half")
    (tmp_path / ".a.bundle.partial" / "inner").mkdir()
    with writing(tmp_path / "a.bundle", 0, force=False) as scratch:
        assert names(scratch) == []
    assert names(tmp_path) == ["a.bundle"]


def test_a_bundle_that_a_killed_run_moved_is_put_back(tmp_path: Path) -> None:
    (tmp_path / ".a.bundle.partial").mkdir()
    bundle(tmp_path / ".a.bundle.partial" / "old", "old")
    with pytest.raises(ExportError, match="exists"), writing(tmp_path / "a.bundle", 0, force=False):
        pass
    assert (tmp_path / "a.bundle" / MANIFEST_FILE).read_text() == "old"


WRITER = """
import sys
from pathlib import Path
from mars_export.runtime.bundle.replace import replacing

target, name = Path(sys.argv[1]), sys.argv[2]
for number in range(100):
    with replacing(target) as scratch:
        log = target / "log"
        (scratch / "log").write_text((log.read_text() if log.exists() else "") + f"{name}{number} ")
"""


def test_four_processes_that_write_again_and_again_lose_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    target = tmp_path / "a.bundle"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(target), name], env=environment)
        for name in "abcd"
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0, 0]
    assert sorted((target / "log").read_text().split()) == sorted(
        f"{name}{number}" for name in "abcd" for number in range(100)
    )
    assert names(tmp_path) == ["a.bundle"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ExportError, match=r"file.*cannot be written to .*another directory"),
        writing(tmp_path / "file" / "x.bundle", 0, force=False),
    ):
        pass


def fail(scratch: Path, number: int) -> None:
    (scratch / "weights.bin").write_bytes(b"half")
    raise OSError(number, os.strerror(number))
