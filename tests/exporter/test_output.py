"""Writing a bundle: the hash of a file is what reading it back would give, and a full disk loses nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import Named

from mars_export.exporter.export import writing
from mars_export.runtime.bundle import files
from mars_export.runtime.bundle.files import MANIFEST_FILE
from mars_export.runtime.bundle.open import open_bundle, rewrite
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

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
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


def interrupted_after(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives during the rename of this number: its handler runs when the call returns."""
    owner = os if name == "rename" else files
    real, calls = getattr(owner, name), []

    def rename(source: Path, target: Path) -> object:
        calls.append(source)
        done = real(source, target)
        if len(calls) == number:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(owner, name, rename)
    if name == "rename":
        monkeypatch.setattr(files, "_exchange", lambda *_: False)


@pytest.mark.parametrize(
    ("name", "number", "kept"), [("rename", 1, "old"), ("rename", 2, "new"), ("_exchange", 1, "new")]
)
def test_an_interrupt_at_a_rename_leaves_one_whole_bundle(
    name: str, number: int, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    interrupted_after(name, number, monkeypatch)
    with pytest.raises(KeyboardInterrupt), writing(old, 0, force=True) as scratch:
        (scratch / MANIFEST_FILE).write_text("new")
    assert (old / MANIFEST_FILE).read_text() == kept
    assert names(tmp_path) == ["a.bundle"]


def test_a_bundle_that_cannot_be_put_back_is_kept_and_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bundle(tmp_path / "a.bundle", "old")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        if source == old:  # another program is faster
            bundle(old, "another program's")

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="not empty"), writing(old, 0, force=True) as scratch:
        (scratch / MANIFEST_FILE).write_text("new")
    assert (old / MANIFEST_FILE).read_text() == "another program's"
    shutil.rmtree(old)
    files.recover(old)
    assert (old / MANIFEST_FILE).read_text() == "old"
    assert names(tmp_path) == ["a.bundle"]


@pytest.mark.parametrize("place", [(os, "mkdir"), (os, "open"), (fcntl, "flock"), (os.path, "samestat")])
def test_a_signal_while_the_scratch_directory_is_made_leaves_nothing(
    place: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = place
    real = getattr(module, name)

    def ended(*args: Any) -> None:
        real(*args)
        raise SystemExit(143)

    tmp_path.joinpath("a").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, ended)
        with pytest.raises(SystemExit), files.replacing(tmp_path / "a" / "a.bundle"):
            pass
    assert not names(tmp_path / "a")


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from mars_export.runtime.bundle import files

real = os.rename
def rename(source, target):
    real(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename, files._exchange = rename, lambda *_: False
with files.replacing(Path(sys.argv[1])) as scratch:
    (scratch / "manifest.json").write_text("half")
"""


@pytest.mark.parametrize("command", ["reads", "rewrites", "exports"])
def test_a_bundle_of_a_writer_killed_between_its_renames_is_found(
    command: str, bundles: Named, tmp_path: Path
) -> None:
    target = tmp_path / "a.bundle"
    shutil.copytree(bundles("llama"), target)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    if command == "reads":
        open_bundle(target, full=True)
    elif command == "rewrites":
        rewrite(target, lambda manifest: manifest)
    else:
        with pytest.raises(ExportError, match="exists"), writing(target, 0, force=False):
            pass
    assert open_bundle(target, full=True).manifest.variants
    assert names(tmp_path) == ["a.bundle"]


WRITER = """
import sys
from pathlib import Path
from typing import Any
from mars_export.runtime.bundle.files import replacing

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
