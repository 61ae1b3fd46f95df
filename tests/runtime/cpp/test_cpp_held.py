"""libmars and bundles that change under it, or that may be anybody's: what is verified is what runs."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.cabi import Library, MarsStatusError
from support.cabi_session import CSession
from support.fixtures import Named

from mars_export.exporter.output import _exchanged
from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.held import State
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.grammar_maker import make

PROMPT, FEW = [5, 9, 200, 17], {"max_new_tokens": 6, "tau": 1.0, "eos_ids": ()}


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """The two change places ten times a second."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            assert _exchanged(one, other)
            over.wait(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_bundles_that_change_places_are_never_mixed(
    library: Library, path: Path, bundles: Named, tmp_path: Path
) -> None:
    """The manifest of one and the graph or the weights of another: once either, as files were opened by
    name.
    """
    other = shutil.copytree(bundles("qwen2"), tmp_path / "other.bundle")
    config = GenerationConfig(max_new_tokens=6, tau=1.0, eos_ids=())
    good = {
        Session.open(each, threads=1, cache_bytes=0).generate(PROMPT, config).token_ids
        for each in (path, other)
    }
    assert len(good) == 2
    if not _exchanged(path, other):
        pytest.skip("this file system exchanges no directories")
    seen = set()
    with exchanging(path, other):
        for _ in range(25):
            with CSession(library, path, threads=1, cache_bytes=0) as session:
                seen.add(tuple(session.generate(PROMPT, **FEW).token_ids))
            seen.add(Session.open(path, threads=1, cache_bytes=0).generate(PROMPT, config).token_ids)
    assert seen <= good


def test_weights_that_are_written_over_end_the_answer(library: Library, path: Path) -> None:
    with CSession(library, path, threads=1) as session:
        assert len(session.generate(PROMPT, **FEW).token_ids) == 6
        with (path / "weights.bin").open("r+b") as file:
            file.write(bytes(4096))
        with pytest.raises(MarsStatusError, match=r"weights.bin: was written to while it is in use; open"):
            session.generate(PROMPT, **FEW)
    with pytest.raises(MarsStatusError, match=r"weights.bin: its content does not match"):
        CSession(library, path)


def test_weights_that_are_replaced_by_name_change_nothing_for_who_has_them(
    library: Library, path: Path
) -> None:
    with CSession(library, path, threads=1) as session:
        before = session.generate(PROMPT, **FEW).token_ids
        (path / "weights.bin").rename(path / "old")
        (path / "weights.bin").write_bytes(b"something else")
        assert session.generate(PROMPT, **FEW).token_ids == before


def test_data_that_the_manifest_does_not_list(library: Library, path: Path) -> None:
    """Python refused it, libmars did not look."""
    shutil.copy(path / "weights.bin", path / "hidden.bin")
    graph = onnx.load(path / "model.onnx", load_external_data=False)
    tensor = next(t for t in graph.graph.initializer if t.external_data)
    next(e for e in tensor.external_data if e.key == "location").value = "hidden.bin"
    onnx.save(graph, path / "model.onnx")
    manifest = parse_manifest((path / "manifest.json").read_text())
    others = [entry for entry in manifest.files if entry.path != "model.onnx"]
    write_manifest(path, replace(manifest, files=(*others, describe(path / "model.onnx"))))
    with pytest.raises(MarsStatusError, match="takes data from `hidden.bin`, which `files` does not list"):
        CSession(library, path)


def test_safe_mode_believes_and_writes_no_stamps(
    library: Library, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    with CSession(library, path, threads=1, safe=1) as session:
        wanted = session.generate(PROMPT, **FEW).token_ids
    assert not (tmp_path / "cache" / "verified").exists()
    with CSession(library, path, threads=1) as session:
        assert session.generate(PROMPT, **FEW).token_ids == wanted
    (stamp,) = (tmp_path / "cache" / "verified").iterdir()
    with (path / "weights.bin").open("r+b") as file:
        file.write(bytes(4096))
    forge(stamp, path)
    with CSession(library, path, threads=1):
        pass  # the user's own word
    with pytest.raises(MarsStatusError, match=r"weights.bin: its content does not match"):
        CSession(library, path, safe=1)


def forge(stamp: Path, path: Path) -> None:
    stamps = json.loads(stamp.read_text())
    stamps["weights.bin"][1:] = State.of((path / "weights.bin").stat())
    stamp.write_text(json.dumps(stamps))


def test_every_bundle_of_the_tests_opens_in_both(library: Library, bundles: Named) -> None:
    for name in ("llama", "qwen2"):
        open_bundle(bundles(name), safe=True)
        with CSession(library, bundles(name), threads=1, safe=1) as session:
            assert session.has_text


def test_a_grammar_is_read_from_the_bundle_that_was_opened(
    library: Library, path: Path, bundles: Named, tmp_path: Path
) -> None:
    """It was opened by the name that the bundle had: by the first request another one may lie there."""
    other = shutil.copytree(bundles("qwen2"), tmp_path / "other.bundle")
    ours, theirs = (
        each / make(each, "g", GenerationConfig(choice=(word,))).file
        for each, word in ((path, "yes"), (other, "no"))
    )
    answer = {"grammar": b"g", "max_new_tokens": 9}
    with (
        CSession(library, path, threads=1) as moved,
        CSession(library, path, threads=1) as changed,
        CSession(library, path, threads=1) as without,
    ):
        before = path.rename(tmp_path / "before.bundle")
        theirs.rename(other / ours.name)
        other.rename(path)
        assert moved.generate(PROMPT, **answer).text == "yes"
        (before / ours.name).write_bytes((path / ours.name).read_bytes())
        with pytest.raises(MarsStatusError, match=r"\.dfa: was written to since the bundle was opened"):
            changed.generate(PROMPT, **answer)
        (before / ours.name).unlink()
        with pytest.raises(MarsStatusError, match=r"\.dfa: cannot be read; open the bundle again"):
            without.generate(PROMPT, **answer)
        assert moved.generate(PROMPT, **answer).text == "yes"
        assert without.generate(PROMPT, **FEW).token_ids
