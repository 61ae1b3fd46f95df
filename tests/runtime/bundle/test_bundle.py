"""A bundle directory: what is missing, changed, linked away or unreadable is said at once, before anything
runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from support.exports import export
from support.fixtures import Named

from mars_export import BundleError, Session, SessionError
from mars_export.runtime.bundle import files
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.bundle.open import open_bundle, write_manifest


@pytest.fixture
def directory(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "bundle")


def test_places_that_are_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such bundle; make one with `mars-export onnx"):
        open_bundle(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"not a bundle: it has no manifest.json"):
        open_bundle(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match=r"manifest.json: not readable"):
        open_bundle(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b" " * 16_000_001)
    with pytest.raises(BundleError, match="larger than 16000000 bytes; this is not a manifest"):
        open_bundle(tmp_path)


def test_a_linked_bundle_is_fine(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(directory)
    open_bundle(tmp_path / "elsewhere")
    (tmp_path / "snapshot").mkdir()  # as in the cache of the hub
    for file in directory.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../{directory.relative_to(tmp_path)}/{file.name}")
    open_bundle(tmp_path / "snapshot", full=True)


def test_missing_short_and_changed_files_are_listed_at_once(directory: Path) -> None:
    (directory / "model.onnx").unlink()
    (directory / "tokenizer.json").write_bytes(b"{}")
    data = bytearray((directory / "weights.bin").read_bytes())
    data[5000] ^= 1
    (directory / "weights.bin").write_bytes(data)
    with pytest.raises(BundleError) as caught:
        open_bundle(directory)
    for line in (
        "model.onnx: missing",
        "tokenizer.json: 2 bytes, the manifest says",
        "weights.bin: its content does not match the manifest's sha256",
    ):
        assert line in str(caught.value)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are hashed from now on."""
    names: list[str] = []
    real = files.sha256_of

    def digest(file: Any) -> str:
        names.append(Path(f"/proc/self/fd/{file.fileno()}").resolve().name)
        return real(file)

    monkeypatch.setattr(files, "sha256_of", digest)
    return names


def test_a_file_found_good_is_not_hashed_again_unless_asked(directory: Path, hashed: list[str]) -> None:
    open_bundle(directory)
    assert sorted(hashed) == ["fp32-cuda.onnx", "model.onnx", "tokenizer.json", "weights.bin"]
    open_bundle(directory)
    assert len(hashed) == 4
    (directory / "weights.bin").touch()
    open_bundle(directory)
    assert hashed[4:] == ["weights.bin"]
    open_bundle(directory, full=True)
    assert len(hashed) == 9


def test_a_new_bundle_is_not_hashed_again(checkpoints: Named, hashed: list[str], tmp_path: Path) -> None:
    export(checkpoints("llama"), tmp_path / "bundle", block=4)
    hashed.clear()
    open_bundle(tmp_path / "bundle")
    assert not hashed


def test_a_file_changed_under_its_old_time_is_found(directory: Path) -> None:
    open_bundle(directory)
    path = directory / "weights.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xaa\xbb\xcc\xdd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BundleError, match="does not match"):
        open_bundle(directory)


def test_opening_leaves_nothing_in_the_bundle(directory: Path) -> None:
    before = sorted(path.name for path in directory.iterdir())
    open_bundle(directory)
    assert sorted(path.name for path in directory.iterdir()) == before


def test_a_user_without_a_cache_hashes_every_time(
    directory: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_export.runtime.bundle.files.cache_dir", lambda: None)
    open_bundle(directory)
    open_bundle(directory)
    assert len(hashed) == 8


@pytest.mark.parametrize("checksum", [None, b"", b"0" * 64, b"\xff" * 80])
def test_a_manifest_without_its_checksum(checksum: bytes | None, directory: Path) -> None:
    (directory / "manifest.sha256").unlink()
    if checksum is not None:
        (directory / "manifest.sha256").write_bytes(checksum)
    with pytest.raises(
        BundleError, match=r"manifest.json does not match manifest.sha256; copy or export the bundle again"
    ):
        open_bundle(directory)


def test_the_checksum_is_what_sha256sum_prints(directory: Path) -> None:
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    assert (directory / "manifest.sha256").read_text() == f"{digest}  manifest.json\n"


def test_a_newer_bundle_is_called_newer_and_not_damaged(directory: Path) -> None:
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace('"format_version": "1', '"format_version": "2'))
    with pytest.raises(BundleError, match=r"this runtime reads 1.x: update mars-export"):
        open_bundle(directory)


@pytest.mark.parametrize(
    "stamp", ["", "{", "[]", "3", "[" * 100_000, '{"weights.bin": 3}', '{"weights.bin": [1, 2, 3, 4]}']
)
def test_a_broken_stamp_only_costs_a_new_hash(
    stamp: str, directory: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    open_bundle(directory)
    (file,) = (tmp_path / "cache" / "verified").iterdir()
    file.write_text(stamp)
    open_bundle(directory)
    assert len(hashed) == 8
    open_bundle(directory)
    assert len(hashed) == 8


def test_old_stamps_are_forgotten(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mars_export.runtime.bundle.files.MAX_STAMPS", 3)
    for i in range(5):
        open_bundle(shutil.copytree(directory, tmp_path / f"{i}.bundle"))
    assert len(list((tmp_path / "cache" / "verified").iterdir())) == 3


def test_an_unknown_variant_names_the_known_ones(directory: Path) -> None:
    with pytest.raises(BundleError, match=r"no variant `fast` \(there are: model, fp32-cuda\)"):
        open_bundle(directory).variant("fast")


def change(directory: Path, part: str, changes: dict[str, Any]) -> None:
    """Set fields of `model` or of the first variant in the manifest."""
    whole = json.loads((directory / "manifest.json").read_text())
    (whole["model"] if part == "model" else whole["variants"][0]).update(changes)
    write_manifest(directory, parse_manifest(json.dumps(whole)))


@pytest.mark.parametrize(
    ("part", "changes", "odd"),
    [
        ("model", {"num_layers": 3}, "past_key_values.2.key"),
        ("model", {"num_layers": 1}, "past_key_values.1.key"),
        ("model", {"num_kv_heads": 1}, "past_key_values.0.key"),
        ("model", {"head_dim": 14}, "past_key_values.0.key"),
        ("model", {"vocab_size": 300}, "logits"),
        ("variant", {"outputs": ["token_ids", "confidence"]}, "entropy, logits, margin"),
        ("variant", {"kv_dtype": "float16"}, "past_key_values.0.key"),
        ("variant", {"kv_layout": "appended"}, r"present.0.key \(KV layout\)"),
    ],
)
def test_a_manifest_that_is_not_of_this_graph(
    part: str, changes: dict[str, Any], odd: str, directory: Path
) -> None:
    change(directory, part, changes)
    with pytest.raises(BundleError, match=f"the graph and the manifest disagree about .*{odd}"):
        Session.open(directory)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"backend": "tensorrt"}, "model: made for tensorrt"),
        ({"slots": 8, "batch": 1, "capacity": 64}, "model: its fixed shapes are for compilers"),
        ({"kv_dtype": "bfloat16"}, "model: ONNX Runtime has no bfloat16 kernels; this graph is for TensorRT"),
    ],
)
def test_a_good_bundle_that_does_not_run_here_says_why(
    changes: dict[str, Any], why: str, directory: Path
) -> None:
    change(directory, "variant", changes)
    with pytest.raises(SessionError, match=why):
        Session.open(directory)


def test_a_device_is_never_replaced_by_another(directory: Path) -> None:
    with pytest.raises(SessionError, match=r"unknown device `tpu` \(known: cpu, cuda\)"):
        Session.open(directory, "tpu")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(SessionError, match=r"no CUDAExecutionProvider.*pip install 'mars-export\[gpu\]'"):
            Session.open(directory, "cuda")
