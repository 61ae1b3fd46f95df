"""Writing a bundle: the hash of a file is what reading it back would give, and a full disk loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mars_export.exporter.graph.hashed import HashedFile
from mars_export.exporter.output import replacing
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import MANIFEST_FILE
from mars_export.runtime.errors import ExportError


@pytest.mark.parametrize(
    "pieces", [[], [b""], [b"a", b"", b"bc"], [bytes(3_000_000), b"x", bytes(range(256)) * 9000]], ids=len
)
def test_its_entry_is_that_of_the_file(pieces: list[bytes], tmp_path: Path) -> None:
    with HashedFile(tmp_path / "weights.bin") as file:
        for piece in pieces:
            file.write(piece)
        entry = file.entry()
    assert entry == describe(tmp_path / "weights.bin")
    assert entry.size == sum(map(len, pieces))


def test_arrays_are_written_as_their_bytes(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float16).reshape(3, 4)
    with HashedFile(tmp_path / "weights.bin") as file:
        file.write(array.view(np.uint8).data)
        entry = file.entry()
    assert (tmp_path / "weights.bin").read_bytes() == array.tobytes()
    assert entry == describe(tmp_path / "weights.bin")


def test_it_is_closed_at_the_end(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "weights.bin") as file:
        file.write(bytes(1_000_000))
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, ExportError), (errno.EIO, OSError)])
def test_a_disk_that_fills_up_is_said_and_the_old_bundle_stays(
    number: int, error: type[Exception], tmp_path: Path
) -> None:
    old = tmp_path / "old.bundle"
    old.mkdir()
    (old / MANIFEST_FILE).write_text("{}")
    with pytest.raises(error, match=os.strerror(number)), replacing(old, 0, force=True) as scratch:
        fail(scratch, number)
    assert [path.name for path in tmp_path.rglob("*")] == ["old.bundle", MANIFEST_FILE]


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to put a bundle in the place of another."""
    if request.param == "two renames":
        monkeypatch.setattr("mars_export.exporter.output._exchanged", lambda *_: False)
    return str(request.param)


def bundle(path: Path, text: str) -> Path:
    path.mkdir()
    (path / MANIFEST_FILE).write_text(text)
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.usefixtures("way")
def test_a_forced_bundle_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    with replacing(old, 0, force=True) as scratch:
        (scratch / MANIFEST_FILE).write_text("new")
        assert (old / MANIFEST_FILE).read_text() == "old"
    assert (old / MANIFEST_FILE).read_text() == "new"
    assert names(tmp_path) == ["a.bundle"]


def test_the_old_bundle_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("the bundle was away for a moment"))
    with replacing(old, 0, force=True) as scratch:
        (scratch / MANIFEST_FILE).write_text("new")
    assert (old / MANIFEST_FILE).read_text() == "new"


def test_a_rename_that_fails_puts_the_old_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    monkeypatch.setattr("mars_export.exporter.output._exchanged", lambda *_: False)
    real, calls = os.rename, []

    def fails_once(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", fails_once)
    with (
        pytest.raises(ExportError, match="What was there before is unchanged"),
        replacing(old, 0, force=True) as scratch,
    ):
        (scratch / MANIFEST_FILE).write_text("new")
    assert (old / MANIFEST_FILE).read_text() == "old"
    assert names(tmp_path) == ["a.bundle"]


def test_a_bundle_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.bundle"

    def export() -> None:
        with replacing(target, 0, force=False) as scratch:
            (scratch / MANIFEST_FILE).write_text("mine")
            bundle(target, "somebody else's")

    with pytest.raises(ExportError, match="exists; give --force to replace it"):
        export()
    assert (target / MANIFEST_FILE).read_text() == "somebody else's"
    assert names(tmp_path) == ["a.bundle"]


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_fills_is_not(tmp_path: Path) -> None:
    target = tmp_path / "a.bundle"
    for name in (".a.bundle-abcdefgh.partial", ".b.bundle-abcdefgh.partial", ".a.bundle-mine.partial"):
        bundle(tmp_path / name, "half")
    with replacing(target, 0, force=False) as living:
        with replacing(target, 0, force=False) as other:
            assert living.is_dir()
            (other / MANIFEST_FILE).write_text("other")
        bundle(living / "x", "y")
        (target / MANIFEST_FILE).unlink()
        target.rmdir()
    assert names(tmp_path) == [".a.bundle-mine.partial", ".b.bundle-abcdefgh.partial", "a.bundle"]


def test_an_old_bundle_that_was_put_aside_comes_back(tmp_path: Path) -> None:
    bundle(tmp_path / ".a.bundle-abcdefgh.replaced", "old")
    with pytest.raises(ExportError, match="exists"), replacing(tmp_path / "a.bundle", 0, force=False):
        pass
    assert (tmp_path / "a.bundle" / MANIFEST_FILE).read_text() == "old"
    assert names(tmp_path) == ["a.bundle"]


WAITS = """
import sys, time
from pathlib import Path
from mars_export.exporter.output import replacing
with replacing(Path(sys.argv[1]), 0, force=False) as scratch:
    (scratch / "weights.bin").write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_after_the_next_start(tmp_path: Path, number: int) -> None:
    target = tmp_path / "a.bundle"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(target)], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    run.send_signal(number)
    run.communicate(timeout=20)
    if number == signal.SIGTERM:
        assert run.returncode == 128 + signal.SIGTERM
        assert names(tmp_path) == []
    with replacing(target, 0, force=False) as scratch:
        (scratch / MANIFEST_FILE).write_text("new")
    assert names(tmp_path) == ["a.bundle"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ExportError, match=r"file.*cannot be written to .*another place"),
        replacing(tmp_path / "file" / "x.bundle", 0, force=False),
    ):
        pass


def fail(scratch: Path, number: int) -> None:
    (scratch / "weights.bin").write_bytes(b"half")
    raise OSError(number, os.strerror(number))
