"""What is verified is what runs: bundles that are exchanged, replaced, written over and cut short while they
are opened, and while they run.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.confined import confined

from mars_export.runtime import BundleError, GenerationConfig, Session
from mars_export.runtime import opening as module
from mars_export.runtime.bundle import files
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.device.ort import OrtBackend
from mars_export.runtime.grammar_maker import make

Named = Callable[[str], Path]
IDS, FEW = [5, 6, 7], GenerationConfig(max_new_tokens=6, tau=1.0)
linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open directories are Linux's")


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "mars.bundle")


@pytest.fixture
def other(bundles: Named, tmp_path: Path) -> Path:
    """Another model's bundle, whose files have the same names."""
    return shutil.copytree(bundles("qwen2"), tmp_path / "other.bundle")


def answer(path: Path) -> tuple[int, ...]:
    return Session.open(path, threads=1, cache_bytes=0).generate(IDS, FEW).token_ids


@pytest.fixture
def before_loading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[int]]:
    """Have something happen between the hashes and the first load, and at every later one if it asks so."""

    def install(happen: Callable[[], None], times: int = 1) -> list[int]:
        real, loads = OrtBackend.of.__func__, []  # type: ignore[attr-defined]

        def of(cls: type[OrtBackend], *arguments: Any) -> OrtBackend:
            loads.append(1)
            if len(loads) <= times:
                happen()
            return real(cls, *arguments)

        monkeypatch.setattr(OrtBackend, "of", classmethod(of))
        return loads

    return install


@linux
def test_a_bundle_exchanged_after_its_hashes_is_not_the_one_that_runs(
    path: Path, other: Path, before_loading: Any
) -> None:
    """Once the name was opened again: the manifest of one bundle, the graph and the weights of another."""
    ours, theirs = answer(path), answer(other)
    assert ours != theirs

    def exchange() -> None:
        path.rename(path.with_name("away"))
        other.rename(path)

    loads = before_loading(exchange)
    session = Session.open(path, threads=1, cache_bytes=0)
    assert session.generate(IDS, FEW).token_ids == ours, "the directory that was verified"
    assert len(loads) == 1
    assert answer(path) == theirs


def test_a_file_renamed_over_is_found_and_what_lies_there_is_verified(
    path: Path, other: Path, before_loading: Any
) -> None:
    """The graph and the weights of another model under ours: their hashes are wrong, so nothing opens."""

    def replace() -> None:
        for name in ("weights.bin", "model.onnx"):
            os.replace(other / name, path / name)

    loads = before_loading(replace)
    with pytest.raises(BundleError, match=r"damaged or incomplete"):
        Session.open(path, threads=1, cache_bytes=0)
    assert len(loads) == 1


def test_a_good_file_put_in_place_of_itself_is_verified_again(path: Path, before_loading: Any) -> None:
    ours = answer(path)

    def touch() -> None:
        shutil.copy(path / "weights.bin", path / "new")
        os.replace(path / "new", path / "weights.bin")

    loads = before_loading(touch)
    assert Session.open(path, threads=1, cache_bytes=0).generate(IDS, FEW).token_ids == ours
    assert len(loads) == 2


def test_written_over_and_back_between_the_hash_and_the_load(path: Path, before_loading: Any) -> None:
    """The same inode, size and times that a program can set: the time that it cannot set tells."""
    weights = path / "weights.bin"

    def write() -> None:
        state, data = weights.stat(), weights.read_bytes()
        with weights.open("r+b") as file:
            file.write(bytes(len(data)))
        with weights.open("r+b") as file:
            file.write(data)
        os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))

    loads = before_loading(write)
    Session.open(path, threads=1, cache_bytes=0)
    assert len(loads) == 2


def test_a_writer_that_never_rests_is_said(path: Path, before_loading: Any) -> None:
    loads = before_loading(lambda: (path / "weights.bin").touch(), times=10**9)
    with pytest.raises(BundleError, match=r"written to while it was opened.*\n  weights.bin"):
        Session.open(path, threads=1, cache_bytes=0)
    assert len(loads) == module.MOST_ATTEMPTS


def test_a_whole_bundle_replaced_while_its_files_are_hashed(
    path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--force` does it: exchanged at once, and the old files deleted."""
    theirs, real, calls = answer(other), files.sha256_of, []
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(path.parent / "cache"))

    def digest(file: Any) -> str:
        if not calls:
            calls.append(1)
            path.rename(path.with_name("away"))
            other.rename(path)
            shutil.rmtree(path.with_name("away"))
        return real(file)

    monkeypatch.setattr(files, "sha256_of", digest)
    assert answer(path) == theirs


CUT = """
import os, sys
from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.errors import MarsError
session = Session.open(sys.argv[1], threads=1, cache_bytes=0)
config = GenerationConfig(max_new_tokens=6, tau=1.0)
print(len(session.generate([5, 6, 7], config).token_ids))
weights = os.path.join(sys.argv[1], "weights.bin")
if sys.argv[2] == "cut":
    os.truncate(weights, 4096)
elif sys.argv[2] == "over":
    with open(weights, "r+b") as file:
        file.write(bytes(4096))
else:
    os.replace(weights, weights + ".old")
try:
    print(len(session.generate([5, 6, 7], config).token_ids))
except MarsError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("how", ["cut", "over"])
def test_weights_that_are_written_to_under_a_session_end_its_answers_and_not_the_process(
    path: Path, how: str
) -> None:
    """Cut short they were SIGBUS in the next step, written over a wrong answer."""
    said = confined(CUT, str(path), how, gigabytes=4.0, seconds=60)
    assert said.splitlines()[0] == "6"
    assert "refused:" in said
    assert "weights.bin: was written to while it is in use; open the bundle again" in said


def test_weights_that_are_replaced_by_name_change_nothing_for_who_has_them(path: Path) -> None:
    said = confined(CUT, str(path), "rename", gigabytes=4.0, seconds=60)
    assert said.splitlines() == ["6", "6"]


def test_sessions_give_their_descriptors_back(path: Path) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    answer(path)
    before = count()
    for _ in range(3):
        answer(path)
        open_bundle(path)
    assert count() == before


def test_a_write_in_the_tick_of_the_hash_is_not_stamped_as_good(path: Path, monkeypatch: Any) -> None:
    """A file system's clock stands still for a tick: a file hashed in the tick of its last write could be
    written once more without another time.
    """
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(path.parent / "cache"))
    slept: list[float] = []
    monkeypatch.setattr("mars_export.runtime.bundle.files.time.sleep", slept.append)
    (path / "weights.bin").touch()
    written = (path / "weights.bin").stat().st_ctime_ns / 1e9
    monkeypatch.setattr("mars_export.runtime.bundle.files.time.time", lambda: written + 0.004)
    open_bundle(path)
    assert max(slept) == pytest.approx(files.TICK - 0.004, abs=1e-5)
    os.utime(path / "weights.bin", ns=(0, 0))
    slept.clear()
    monkeypatch.setattr("mars_export.runtime.bundle.files.time.time", lambda: 4e9)
    open_bundle(path)
    assert not slept


def test_a_fork_has_the_bundle_still(path: Path) -> None:
    bundle, code = open_bundle(path), 1
    child = os.fork()
    if not child:
        try:
            code = 0 if bundle.place("manifest.json").read_bytes() and not bundle.changed else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_started_by_a_session_does_not_inherit_its_bundle(path: Path) -> None:
    session = Session.open(path, threads=1, cache_bytes=0)
    assert session.bundle.held is not None
    listing = subprocess.run(
        [sys.executable, "-c", "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in "
         "os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"],
        capture_output=True, text=True, check=True, close_fds=False,
    ).stdout  # fmt: skip
    assert path.name not in listing


@pytest.fixture
def grammar(path: Path) -> Path:
    """The file of a grammar `g` in the bundle."""
    return path / make(path, "g", GenerationConfig(choice=("yes",))).file


def follow(session: Session) -> str:
    return session.generate(IDS, GenerationConfig(max_new_tokens=9, grammar="g")).text


@linux
def test_a_grammar_is_read_from_the_bundle_that_was_opened(path: Path, grammar: Path, other: Path) -> None:
    """It was opened by the name that the bundle had: by the first request another one may lie there."""
    session = Session.open(path, threads=1, cache_bytes=0)
    theirs = make(other, "g", GenerationConfig(choice=("no",))).file
    (other / theirs).rename(other / grammar.name)
    path.rename(path.with_name("before.bundle"))
    other.rename(path)
    assert follow(session) == "yes"


def test_a_grammar_that_is_written_over_is_not_followed(path: Path, grammar: Path, other: Path) -> None:
    session = Session.open(path, threads=1, cache_bytes=0)
    theirs = other / make(other, "g", GenerationConfig(choice=("no",))).file
    grammar.write_bytes(theirs.read_bytes())
    with pytest.raises(
        BundleError, match=r"\.dfa: was written to since the bundle was opened; open it again"
    ):
        follow(session)
    grammar.unlink()
    with pytest.raises(BundleError, match=r"\.dfa: cannot be read .*; open the bundle again"):
        follow(session)
    assert session.generate(IDS, FEW).token_ids
