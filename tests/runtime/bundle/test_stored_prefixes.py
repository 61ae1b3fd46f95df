"""Prefixes in a bundle: stored, described, removed; nothing is left behind, whenever the writer is killed."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.manifests import GOOD, HASH, changed
from support.tiny import Named
from typer.testing import CliRunner

from mars_export.cli import app
from mars_export.runtime import BundleError, Session, SessionError
from mars_export.runtime.bundle import prefixes, profiles
from mars_export.runtime.bundle.files import FileEntry
from mars_export.runtime.bundle.manifest import Manifest, Profile, parse_manifest
from mars_export.runtime.bundle.open import CHECKSUM_FILE, open_bundle, write_manifest
from mars_export.runtime.bundle.prefixes import Made
from mars_export.runtime.bundle.stored import StoredPrefix, file_size
from mars_export.runtime.warm import read, written


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles("llama"), tmp_path / "mine.bundle"))


def made(manifest: Manifest, ids: list[int], name: str = "system", **changes: Any) -> Made:
    """A prefix with some entries, which are the model's own only in their shape."""
    model, hashes = manifest.model, {entry.path: entry.sha256 for entry in manifest.files}
    draw = np.random.default_rng(sum(ids))
    shape = (model.num_kv_heads, len(ids), model.head_dim)
    arrays = [draw.standard_normal(shape).astype("f4") for _ in range(2 * model.num_layers)]
    file, content = written(ids, arrays, "float32")
    fields: dict[str, Any] = {
        "name": name, "file": file, "length": len(ids), "piece": None, "variant": "model",
        "variant_sha256": hashes["model.onnx"], "weights_sha256": hashes["weights.bin"],
        "precision": "float32", "kv_dtype": "float32", "kv_layout": "static", "device": "cpu",
    }  # fmt: skip
    return StoredPrefix(**{**fields, **changes}), content


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_stored_described_replaced_removed(path: Path) -> None:
    before, files = open_bundle(path).manifest, names(path)
    prefixes.store(path, [made(before, [1, 2, 3])])
    prefixes.store(path, [made(before, [7, 8], "other")])
    prefixes.store(path, [made(before, [4, 5, 6, 7])])
    found = prefixes.described(path)
    assert [(p.prefix.name, p.prefix.length, p.state) for p in found] == [
        ("other", 2, "good"), ("system", 4, "good"),
    ]  # fmt: skip
    assert [p.num_bytes for p in found] == [file_size(before.model.entry_bytes("float32"), n) for n in (2, 4)]
    assert len(list(path.glob("prefix-*"))) == 2, "the file of what was replaced is gone"
    assert prefixes.remove(path, "system") == 1
    assert prefixes.remove(path, "other") == 1
    assert names(path) == files
    assert open_bundle(path, full=True).manifest == replace(before, format_version="1.2")
    with pytest.raises(SessionError, match=r"no prefix `other` \(there are: none\); `mars-export prefix`"):
        prefixes.remove(path, "other")
    with pytest.raises(SessionError, match="no prefix `x`"):
        prefixes.described(path, "x")


def test_two_may_share_a_file(path: Path) -> None:
    manifest = open_bundle(path).manifest
    prefixes.store(path, [made(manifest, [1, 2, 3])])
    prefixes.store(path, [made(manifest, [1, 2, 3], "twin")])
    assert len(list(path.glob("prefix-*"))) == 1
    prefixes.remove(path, "system")
    assert open_bundle(path, full=True).manifest.prefixes[0].name == "twin"
    prefixes.remove(path, "twin")
    assert not list(path.glob("prefix-*"))


def test_sizes_of_pieces_lie_side_by_side(path: Path) -> None:
    manifest = open_bundle(path).manifest
    both = [made(manifest, [1, 2, 3, 4], piece=4), made(manifest, [1, 2, 3, 4, 5, 6], piece=6)]
    prefixes.store(path, both)
    assert len(prefixes.described(path, "system")) == 2
    prefixes.store(path, both[:1])
    assert len(prefixes.described(path, "system")) == 1
    assert len(list(path.glob("prefix-*"))) == 1
    assert prefixes.remove(path, "system") == 1


def test_profiles_and_prefixes_leave_each_other_alone(path: Path) -> None:
    manifest = open_bundle(path).manifest
    prefixes.store(path, [made(manifest, [1, 2, 3])])
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    profiles.store(path, Profile("sums", 0.9, "probability", "model", hashes["model.onnx"]))
    prefixes.store(path, [made(manifest, [1, 2], "b")])
    now = open_bundle(path, full=True).manifest
    assert ([p.name for p in now.prefixes], [p.name for p in now.profiles]) == (["system", "b"], ["sums"])
    profiles.remove(path, "sums")
    assert len(open_bundle(path, full=True).manifest.prefixes) == 2


@pytest.mark.parametrize("survives", range(9))
def test_a_bundle_opens_whenever_the_writer_dies(
    path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """The process is stopped before each of its writes and renames in turn; the next one clears up."""
    manifest, calls = open_bundle(path).manifest, 0
    prefixes.store(path, [made(manifest, [9, 9])])

    def count(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > survives:
                raise SystemExit
            return real(*arguments, **named)

        return call

    monkeypatch.setattr(os, "fsync", count(os.fsync))
    monkeypatch.setattr(Path, "replace", count(Path.replace))
    # A killed process runs no `finally` and no handler either.
    monkeypatch.setattr(Path, "unlink", count(Path.unlink))
    with suppress(SystemExit):
        prefixes.store(path, [made(manifest, [1, 2, 3])])
    monkeypatch.undo()
    [left] = open_bundle(path, full=True).manifest.prefixes
    assert left.length in (2, 3)
    prefixes.store(path, [made(manifest, [4, 5, 6, 7])])
    [now] = open_bundle(path, full=True).manifest.prefixes
    assert names(path) == sorted([*names_of(path), "manifest.json", CHECKSUM_FILE])
    assert now.length == 4


def names_of(path: Path) -> list[str]:
    return [entry.path for entry in open_bundle(path).manifest.files]


def test_only_what_a_writer_left_is_cleared(path: Path) -> None:
    manifest = open_bundle(path).manifest
    mine = [
        "notes.txt",
        ".hidden",
        ".manifest.json.swp",
        "prefix-mine.kv",
        "prefix-0123.kv",
        ".a.0123456789abcdef",
    ]
    left = [
        "prefix-0123456789abcdef.kv", ".prefix-0123456789abcdef.kv.0123456789abcdef",
        ".manifest.json.00112233445566aa", ".manifest.sha256.00112233445566aa",
    ]  # fmt: skip
    for name in (*mine, *left):
        (path / name).write_text("x")
    (path / "prefix-aaaaaaaaaaaaaaaa.kv").mkdir()
    open_bundle(path)
    assert set(left) <= set(names(path)), "a reader deletes nothing"
    prefixes.store(path, [made(manifest, [1, 2, 3])])
    assert not set(left) & set(names(path))
    assert set(mine) <= set(names(path))


def test_a_disk_that_refuses_leaves_the_bundle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(path)
    new = made(open_bundle(path).manifest, [1, 2, 3])

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        BundleError, match=r"cannot be written \(No space left on device\); nothing is damaged"
    ):
        prefixes.store(path, [new])
    monkeypatch.undo()
    assert names(path) == before
    assert open_bundle(path, full=True).manifest.prefixes == ()


def test_a_reader_beside_a_writer_sees_one_or_the_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes between a reader's manifest and its look at the files."""
    manifest = open_bundle(path).manifest
    prefixes.store(path, [made(manifest, [1, 2, 3])])
    from mars_export.runtime.bundle import open as module

    real, calls = module.verify, 0

    def late(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            monkeypatch.setattr(module, "verify", real)
            prefixes.remove(path, "system")
        real(*arguments, **named)

    monkeypatch.setattr(module, "verify", late)
    assert open_bundle(path).manifest.prefixes == ()


def test_a_damaged_one_is_named(path: Path) -> None:
    prefix, content = made(open_bundle(path).manifest, [1, 2, 3])
    prefixes.store(path, [(prefix, content)])
    (path / prefix.file).write_bytes(content[:-1] + b"\x55")
    with pytest.raises(BundleError, match=f"{prefix.file}: its content does not match"):
        open_bundle(path)
    (path / prefix.file).unlink()
    with pytest.raises(BundleError, match=f"{prefix.file}: missing"):
        Session.open(path, threads=1)


def test_ids_outside_the_vocabulary_are_refused(path: Path) -> None:
    manifest = open_bundle(path).manifest
    prefix, content = made(manifest, [1, manifest.model.vocab_size])
    prefixes.store(path, [(prefix, content)])
    # Heads too narrow for firm steps: it must be of the pieces that a session reads, to be looked at.
    stored = open_bundle(path).manifest
    write_manifest(path, replace(stored, prefixes=(replace(prefix, piece=2),)))
    with pytest.raises(BundleError, match=f"token id {manifest.model.vocab_size} is outside the vocabulary"):
        Session.open(path, threads=1)


def test_a_file_of_another_size_is_not_mapped(path: Path) -> None:
    manifest = open_bundle(path).manifest
    prefix, content = made(manifest, [1, 2, 3])
    for data in (b"", content[:-1], content + b"\0"):
        (path / prefix.file).write_bytes(data)
        with pytest.raises(BundleError, match=r"(cannot be mapped|bytes are not 3 tokens)"):
            read(path, prefix, manifest.model)


SIZE = file_size(GOOD.model.entry_bytes("float32"), 2)
FILE = "prefix-0123456789abcdef.kv"
PREFIX = StoredPrefix(
    "system", FILE, 2, None, "model", HASH, HASH, "float32", "float32", "static", "cpu", None, {"date": "x"}
)
WITH = replace(GOOD, files=(*GOOD.files, FileEntry(FILE, SIZE, HASH)), prefixes=(PREFIX,))


def test_the_manifest_says_it() -> None:
    assert parse_manifest(WITH.to_json()) == WITH
    assert parse_manifest(changed("prefixes", ..., WITH)).prefixes == ()
    assert parse_manifest(changed("prefixes", None, WITH)).prefixes == ()


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("prefixes", {}, "prefixes: a list is expected"),
        ("prefixes", [asdict(PREFIX)] * 257, "prefixes: at most 256 entries"),
        ("prefixes", [asdict(PREFIX)] * 2, "prefix `system` is there twice for variant `model`"),
        ("prefixes.0.name", "../x", r"prefixes\[0\].name: `../x` is not letters"),
        ("prefixes.0.name", "", r"prefixes\[0\].name: a non-empty string"),
        ("prefixes.0.file", "weights.bin", r"prefixes\[0\].file: `weights.bin` is not prefix-"),
        ("prefixes.0.file", "prefix-0123456789abcdef.kv/..", r"prefixes\[0\].file: .* is not prefix-"),
        ("prefixes.0.file", "prefix-fedcba9876543210.kv", "which `files` does not list"),
        ("prefixes.0.length", 0, r"prefixes\[0\].length: an integer of 1 to"),
        ("prefixes.0.length", 3, rf"prefix `system`: 3 tokens take \d+ bytes, {FILE} has {SIZE}"),
        ("prefixes.0.length", 2**30, "the context holds"),
        ("prefixes.0.length", 2**70, r"prefixes\[0\].length: an integer of 1 to"),
        ("prefixes.0.piece", 0, r"prefixes\[0\].piece: an integer of 1 to"),
        ("prefixes.0.piece", 4, r"prefixes\[0\].length: 2 is not a multiple of piece, 4"),
        ("prefixes.0.variant", "none", "prefix `system` is for variant `none`, which is not there"),
        ("prefixes.0.kv_dtype", "int8", r"prefixes\[0\].kv_dtype: `int8` is not one of"),
        ("prefixes.0.variant_sha256", ..., r"prefixes\[0\].variant_sha256: a non-empty string"),
        ("prefixes.0.device", 3, r"prefixes\[0\].device: a non-empty string"),
        ("prefixes.0.evidence", [], r"prefixes\[0\].evidence: an object"),
    ],
)  # fmt: skip
def test_every_way_it_can_be_wrong(path: str, value: Any, what: str) -> None:
    with pytest.raises(BundleError, match=what):
        parse_manifest(changed(path, value, WITH))


# --- the commands ---


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def system(tmp_path: Path) -> Path:
    file = tmp_path / "system.txt"
    file.write_text("be the inner man, and the outer one\n")
    return file


@pytest.fixture
def firm(tmp_path: Path) -> Path:
    from support.firm import export_firm

    return export_firm("fp32", tmp_path)


def test_the_command_stores_and_the_others_tell(firm: Path, system: Path) -> None:
    assert "no prefixes; `mars-export prefix BUNDLE" in invoke("prefix", "list", str(firm)).output
    done = invoke("prefix", str(firm), "--system", str(system), "--name", "inner")
    assert done.exit_code == 0, done.output
    assert "inner: " in done.output
    session = Session.open(firm, threads=1)
    opening = [{"role": "system", "content": "be the inner man, and the outer one"}]
    reply = session.generate([*opening, {"role": "user", "content": "the man"}])
    [prefix] = open_bundle(firm).manifest.prefixes
    assert reply.stats.cached_tokens == prefix.length > 10
    assert prefix.evidence["system"] == "system.txt"
    listed = invoke("prefix", "list", str(firm)).output
    assert all(word in listed for word in ("inner", "model", "cpu", "any", "good"))
    assert f"prefix    inner: {prefix.length} tokens on model (cpu)" in invoke("inspect", str(firm)).output
    shown = invoke("prefix", "show", str(firm), "inner").output
    assert prefix.file in shown
    assert "system.txt" in shown
    [one] = json.loads(invoke("prefix", "list", str(firm), "--json").output)
    assert (one["name"], one["stale"], one["length"]) == ("inner", [], prefix.length)
    [again] = json.loads(
        invoke("prefix", "--name", "inner", "--system", str(system), str(firm), "--json").output
    )
    assert again["file"] == prefix.file, "the same entries again"
    assert "removed 1 prefix(es) named inner" in invoke("prefix", "remove", str(firm), "inner").output
    assert not list(firm.glob("prefix-*"))


def test_messages_and_tools_are_files_too(firm: Path, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('[{"role": "user", "content": "the man"}]')
    (tmp_path / "t.json").write_text('[{"type": "function", "function": {"name": "f", "parameters": {}}}]')
    done = invoke(
        "prefix", str(firm), "--messages", str(tmp_path / "m.json"), "--tools", str(tmp_path / "t.json"),
        "--name", "asked", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    [prefix] = json.loads(done.output)
    assert prefix["evidence"].items() >= {"messages": "m.json", "tools": "t.json"}.items()


def test_wrong_words_are_said(firm: Path, system: Path, tmp_path: Path) -> None:
    both = invoke("prefix", str(firm), "--system", str(system), "--messages", str(system), "--name", "x")
    assert "--system FILE or --messages FILE" in str(both.exception)
    assert "--system FILE or --messages FILE" in str(invoke("prefix", str(firm), "--name", "x").exception)
    assert invoke("prefix", str(firm), "--system", str(system)).exit_code == 2
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xfa")
    done = invoke("prefix", str(firm), "--system", str(tmp_path / "latin"), "--name", "x")
    assert "not UTF-8 text" in str(done.exception)
    assert "store" in invoke("prefix", "--help").output


def test_a_stale_one_is_a_warning_of_the_command(firm: Path, system: Path) -> None:
    from support.shell import run

    invoke("prefix", str(firm), "--system", str(system), "--name", "inner")
    manifest = open_bundle(firm).manifest
    write_manifest(
        firm, replace(manifest, prefixes=(replace(manifest.prefixes[0], weights_sha256="0" * 64),))
    )
    done = run("generate", str(firm), "-p", "the man", "-n", "2")
    assert done.stderr.count("warning: ") == 1
    assert "Warning:" not in done.stderr, "no word of Python's own"
    assert "mars-export prefix" in done.stderr
