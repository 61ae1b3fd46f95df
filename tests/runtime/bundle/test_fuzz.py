"""Corrupted bundles: whatever happened to the files, opening them ends in BundleError."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fixtures import Named

from mars_export import BundleError, Session

FILES = ("model.onnx", "tokenizer.json", "weights.bin")


@pytest.fixture(scope="module")
def directory(bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of this module's own; each test puts back what it broke."""
    target = tmp_path_factory.mktemp("fuzz") / "bundle"
    shutil.copytree(bundles("llama"), target, ignore=shutil.ignore_patterns(".*"))
    return target


@contextmanager
def broken(path: Path, data: bytes) -> Iterator[None]:
    whole = path.read_bytes()
    assert whole != data
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole)


def flipped(data: bytes, draw: random.Random, times: int) -> bytes:
    changed = bytearray(data)
    for place in draw.sample(range(len(data)), times):
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits(name: str, directory: Path) -> None:
    draw = random.Random(name)
    for i in range(40):
        with (
            broken(directory / name, flipped((directory / name).read_bytes(), draw, 1 + i % 3)),
            pytest.raises(BundleError, match=f"{name}: its content"),
        ):
            Session.open(directory)


@pytest.mark.parametrize("name", FILES)
def test_files_cut_short_or_grown(name: str, directory: Path) -> None:
    data, draw = (directory / name).read_bytes(), random.Random(name)
    for cut in [
        b"",
        data[:-1],
        data + b"\0",
        data * 2,
        *(data[: draw.randrange(len(data))] for _ in range(20)),
    ]:
        with (
            broken(directory / name, cut),
            pytest.raises(BundleError, match=f"{name}: {len(cut)} bytes, the manifest says {len(data)}"),
        ):
            Session.open(directory)


@pytest.mark.parametrize("name", [*FILES, "manifest.json", "manifest.sha256"])
def test_missing_files_and_directories_in_their_place(name: str, directory: Path) -> None:
    path = directory / name
    data = path.read_bytes()
    path.unlink()
    try:
        with pytest.raises(BundleError, match=r"missing|no manifest.json|manifest.sha256"):
            Session.open(directory)
        path.mkdir()
        with pytest.raises(BundleError, match=r"missing|no manifest.json|manifest.sha256"):
            Session.open(directory)
        path.rmdir()
    finally:
        path.write_bytes(data)


def test_a_manifest_with_a_flipped_bit(directory: Path) -> None:
    data, draw = (directory / "manifest.json").read_bytes(), random.Random(7)
    for _ in range(200):
        with broken(directory / "manifest.json", flipped(data, draw, 1)), pytest.raises(BundleError):
            Session.open(directory)
