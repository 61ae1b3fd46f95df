"""`trt` on a bundle that others change meanwhile: nobody's work is lost, and what is written opens. The
engines are stand-ins.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.engines import SMALL
from support.fixtures import Named

from mars_export import ExportError, MarsError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.tensorrt import build as tensorrt
from mars_export.exporter.tensorrt import engines
from mars_export.exporter.tensorrt.engines import add_engine, export_engine
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.files import FileEntry
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle, rewrite

NAME = "rtx-sm86-fixed"


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "mars.bundle")


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """No TensorRT, and something that happens while the engine is built."""

    def install(happen: Callable[[], None] = lambda: None, data: bytes = b"engine") -> None:
        def build(*_: Any) -> tensorrt.Built:
            happen()
            return tensorrt.Built(data, "1.7.1.116", "12", 1.0, 10**6)

        monkeypatch.setattr(tensorrt, "load", lambda _: None)
        monkeypatch.setattr(tensorrt, "require", lambda *_: None)
        monkeypatch.setattr(tensorrt, "build", build)

    return install


def profile(path: Path, name: str = "sums") -> Profile:
    digest = next(e.sha256 for e in open_bundle(path).manifest.files if e.path == "model.onnx")
    return Profile(name, 0.9, "probability", "model", digest)


def names(path: Path) -> tuple[set[str], set[str], set[str]]:
    manifest = open_bundle(path, full=True).manifest
    return (
        {p.name for p in manifest.profiles},
        {v.name for v in manifest.variants},
        {e.path for e in manifest.files},
    )


def test_what_came_and_went_while_an_engine_was_built_is_kept(
    path: Path, building: Callable[..., None]
) -> None:
    """Once the bundle was put back as it was before the build, with an engine more: a profile of in between
    was lost in silence.
    """
    profiles.store(path, profile(path, "old"))

    def meanwhile() -> None:
        profiles.store(path, profile(path, "new"))
        profiles.remove(path, "old")
        entry = FileEntry("notes.txt", 1, sha256(b"x").hexdigest())
        rewrite(path, lambda now: replace(now, files=(*now.files, entry)), {"notes.txt": b"x"})

    building(meanwhile)
    outcome = add_engine(open_bundle(path), path, SMALL)
    assert outcome.variant is not None
    found = names(path)
    assert found[0] == {"new"}
    assert found[1] == {"model", NAME}
    assert {"notes.txt", f"{NAME}.engine", f"{NAME}.onnx"} <= found[2]
    assert not [p.name for p in path.parent.iterdir() if p.name.startswith(".")]


def test_a_bundle_that_was_replaced_meanwhile_gets_no_engine_of_another(
    path: Path, bundles: Named, building: Callable[..., None]
) -> None:
    def replace_it() -> None:
        shutil.rmtree(path)
        shutil.copytree(bundles("qwen2"), path)

    building(replace_it)
    with pytest.raises(ExportError, match="was replaced while the engine was built"):
        add_engine(open_bundle(path), path, SMALL)
    assert names(path)[1] == {"model"}


def test_two_builds_of_one_engine(path: Path, building: Callable[..., None]) -> None:
    def other() -> None:
        building(data=b"theirs")
        add_engine(open_bundle(path), path, SMALL)

    building(other)
    with pytest.raises(ExportError, match=r"got an engine `rtx-sm86-fixed` during the build; give --force"):
        add_engine(open_bundle(path), path, SMALL)
    assert (path / f"{NAME}.engine").read_bytes() == b"theirs"
    building(data=b"ours")
    add_engine(open_bundle(path), path, SMALL, force=True)
    assert (path / f"{NAME}.engine").read_bytes() == b"ours"
    assert names(path)[1] == {"model", NAME}


@pytest.mark.parametrize("how", ["in place", "copy", "checkpoint"])
def test_what_no_reader_opens_is_not_kept(
    how: str,
    path: Path,
    checkpoints: Named,
    tmp_path: Path,
    building: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once `trt` ended with 0 and left a bundle that nobody opened: `onnx` opened its own, `trt` did not."""
    building()
    real = engines._entry

    def wrong(*arguments: Any) -> Any:
        return replace(real(*arguments), outputs=("confidence",))

    monkeypatch.setattr(engines, "_entry", wrong)
    before = names(path)
    made = tmp_path / "made"
    options = ExportOptions(
        block=6, precision="fp16", activations="fp16", embedding="float", head="float", allow_drift=True
    )
    run: dict[str, Callable[[], object]] = {
        "in place": lambda: add_engine(open_bundle(path), path, SMALL),
        "copy": lambda: add_engine(open_bundle(path), made, SMALL),
        "checkpoint": lambda: export_engine(open_checkpoint(str(checkpoints("llama"))), made, options, SMALL),
    }
    with pytest.raises(MarsError, match="token_ids and confidence are needed"):
        run[how]()
    assert names(path) == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
