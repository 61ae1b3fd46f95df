"""Profiles in a bundle: stored, found, refused when stale, removed; and a bundle that opens whenever the
writer is killed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Named

from mars_export import Session, SessionError
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import CHECKSUM_FILE, Bundle, open_bundle


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "mine.bundle")


def profile(path: Path, **changes: Any) -> Profile:
    manifest = open_bundle(path).manifest
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    made = Profile(
        "sums",
        0.9,
        "margin",
        "model",
        hashes["model.onnx"],
        {"task": "sums", "max_drop": 0.05},
        hashes["weights.bin"],
        "float32",
        3,
    )
    return replace(made, **changes)


def test_a_stored_profile_is_used(path: Path) -> None:
    before = open_bundle(path).manifest
    profiles.store(path, profile(path))
    config = Session.open(path, threads=1).profile("sums")
    assert (config.tau, config.metric, config.masks) == (0.9, "margin", 3)
    assert (
        replace(open_bundle(path, full=True).manifest, profiles=(), format_version=before.format_version)
        == before
    )
    assert len((path / CHECKSUM_FILE).read_text().splitlines()) == 1


def test_storing_again_replaces_it_and_keeps_the_others(path: Path) -> None:
    for stored in (profile(path), profile(path, name="other"), profile(path, tau=0.8)):
        profiles.store(path, stored)
    assert [(p.name, p.tau) for p in open_bundle(path).manifest.profiles] == [("other", 0.9), ("sums", 0.8)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"variant_sha256": "0" * 64}, r"the graph model.onnx is not the one"),
        ({"weights_sha256": "0" * 64}, "the weights are not those"),
        ({"accuracy_level": 4}, "calibrated at accuracy level 4, but None is running"),
        ({"precision": "int4"}, "calibrated in int4, but float32 is running"),
    ],
)
def test_a_stale_profile_is_refused_with_the_command_that_renews_it(
    path: Path, change: dict[str, Any], reason: str
) -> None:
    profiles.store(path, profile(path, **change))
    with pytest.raises(
        SessionError,
        match=rf"(?s)profile `sums` is stale: .*{reason}.*"
        r"mars-export calibrate \S*mine.bundle --task sums --max-drop 0.05",
    ):
        Session.open(path, threads=1).profile("sums")
    (listed,) = profiles.states(path)
    assert listed["stale"]


def test_a_profile_of_another_variant_is_stale(path: Path) -> None:
    manifest = open_bundle(path).manifest
    twin = replace(manifest.variants[0], name="twin")
    bundle = Bundle(path, replace(manifest, variants=(*manifest.variants, twin), profiles=(profile(path),)))
    assert profiles.find(bundle, manifest.variants[0], "sums").tau == 0.9
    with pytest.raises(SessionError, match="calibrated on variant model, but twin is running"):
        profiles.find(bundle, twin, "sums")
    both = Bundle(
        path, replace(bundle.manifest, profiles=(profile(path), profile(path, variant="twin", tau=0.7)))
    )
    assert profiles.find(both, twin, "sums").tau == 0.7


def test_unknown_names_list_the_known_ones(path: Path) -> None:
    with pytest.raises(SessionError, match=r"no profile `x` \(there are: none\)"):
        Session.open(path, threads=1).profile("x")
    profiles.store(path, profile(path))
    with pytest.raises(SessionError, match=r"no profile `x` \(there are: sums\)"):
        profiles.remove(path, "x")


def test_removal(path: Path) -> None:
    before = (path / "manifest.json").read_bytes()
    profiles.store(path, profile(path))
    profiles.remove(path, "sums")
    assert (path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("survives", range(7))
def test_a_bundle_opens_whenever_the_writer_dies(
    path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """The process is stopped before each of its writes and renames in turn."""
    calls, made = 0, profile(path)

    def count(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > survives:
                raise KeyboardInterrupt
            return real(*arguments, **named)

        return call

    monkeypatch.setattr(os, "fsync", count(os.fsync))
    monkeypatch.setattr(Path, "replace", count(Path.replace))
    try:
        profiles.store(path, made)
    except KeyboardInterrupt:
        pass
    else:
        assert survives == 6
    monkeypatch.undo()
    stored = open_bundle(path, full=True).manifest.profiles
    assert len(stored) == (1 if survives >= 4 else 0)
    profiles.store(path, profile(path, tau=0.5))
    assert [p.tau for p in open_bundle(path).manifest.profiles] == [0.5]
    assert [p.name for p in path.parent.iterdir()] == [path.name]
