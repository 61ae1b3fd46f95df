"""Safe mode against bundles that are anybody's: no template runs, no stamp counts, no engine loads, nothing
is larger than it need be.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.manifests import ENGINE
from support.paths import ROOT
from typer.testing import CliRunner

from mars_export import BundleError, GenerationConfig, Session, SessionError
from mars_export.cli import app
from mars_export.runtime.bundle import files
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import Manifest, parse_manifest
from mars_export.runtime.bundle.open import (
    SAFE_FILES,
    SAFE_MANIFEST,
    SAFE_PARSED,
    open_bundle,
    write_manifest,
)

TALK = [{"role": "user", "content": "the inner"}]


def rewritten(path: Path, **changes: Any) -> Manifest:
    manifest = replace(parse_manifest((path / "manifest.json").read_text()), **changes)
    write_manifest(path, manifest)
    return manifest


def test_a_template_does_not_run_where_a_table_stands_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = open_bundle(path).manifest.text
    assert text is not None and text.chat is not None
    prompt = Session.open(path, threads=1, cache_bytes=0).encode(TALK)
    rewritten(path, text=replace(text, chat_template="{{ boom(1) }}{% for"))
    with pytest.raises(BundleError, match="not valid jinja2"):
        Session.open(path, threads=1, cache_bytes=0)

    def never(*_: object) -> None:
        raise AssertionError("a foreign template was compiled")

    monkeypatch.setattr("mars_export.runtime.text.tokenizer.Template", never)
    session = Session.open(path, threads=1, cache_bytes=0, safe=True)
    assert session.encode(TALK) == prompt
    assert session.generate(TALK, GenerationConfig(max_new_tokens=2)).text is not None
    with pytest.raises(SessionError, match=r"does not cover this conversation.*without safe mode"):
        session.encode([{"role": "user", "content": "x", "name": "y"}])


def test_without_a_table_messages_are_refused_and_texts_go_on(path: Path) -> None:
    text = open_bundle(path).manifest.text
    assert text is not None
    rewritten(path, text=replace(text, chat=None))
    session = Session.open(path, threads=1, cache_bytes=0, safe=True)
    with pytest.raises(SessionError, match=r"safe mode runs no chat template, .*without safe mode"):
        session.encode(TALK)
    assert session.encode("the inner")
    assert Session.open(path, threads=1, cache_bytes=0).encode(TALK)


def test_stamps_are_neither_believed_nor_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = path.parent / "cache"
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(cache))
    hashed: list[int] = []
    real = files.sha256_of
    monkeypatch.setattr(files, "sha256_of", lambda file: hashed.append(1) or real(file))
    open_bundle(path, safe=True)
    assert len(hashed) == 4 and not (cache / "verified").exists()
    open_bundle(path)
    (stamp,) = (cache / "verified").iterdir()
    before = stamp.read_bytes(), stamp.stat().st_mtime_ns
    open_bundle(path)
    assert len(hashed) == 8
    open_bundle(path, safe=True)
    Session.open(path, threads=1, cache_bytes=0, safe=True)
    assert len(hashed) == 16
    assert before == (stamp.read_bytes(), stamp.stat().st_mtime_ns)


def test_an_engine_is_not_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_bundle(path).manifest
    (path / "e.engine").write_bytes(b"x")
    engine = replace(
        manifest.variants[0], name="trt", backend="tensorrt_rtx", file="e.engine", weights=None, capacity=64,
        engine=replace(ENGINE, graph="model.onnx"),
    )  # fmt: skip
    files = (*manifest.files, describe(path / "e.engine"))
    rewritten(path, variants=(*manifest.variants, engine), files=files)
    monkeypatch.setattr(
        "mars_export.runtime.device.trt.backend.TrtBackend.open",
        lambda *_: pytest.fail("an engine was loaded"),
    )
    for device in ("cpu", "cuda"):
        with pytest.raises(SessionError, match=r"which can run any code: safe mode runs ONNX graphs only"):
            Session.open(path, device, variant="trt", cache_bytes=0, safe=True)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("SAFE_MANIFEST", 100, r"the manifest has \d+ bytes, 100 are allowed"),
        ("SAFE_FILES", 2, "there are 4 files, 2 are allowed"),
        ("SAFE_PARSED", 1000, r"model.onnx has \d+ bytes, 1000 are allowed"),
        ("SAFE_PARSED", 1000, r"tokenizer.json has \d+ bytes, 1000 are allowed"),
    ],
)
def test_what_is_larger_than_it_need_be(
    limit: str, value: int, message: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"mars_export.runtime.bundle.open.{limit}", value)
    monkeypatch.setattr(files, "sha256_of", lambda _: pytest.fail("hashed before it was measured"))
    with pytest.raises(BundleError, match=message) as caught:
        open_bundle(path, safe=True)
    assert "--trust" in str(caught.value)
    monkeypatch.undo()
    open_bundle(path)


def test_more_than_the_memory_holds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.machine.available", lambda: 1000)
    for is_safe, words in (
        (False, "not enough memory"),
        (True, r"files have \d+ MB, 0 MB of memory are free: safe mode takes no more"),
    ):
        with pytest.raises(SessionError, match=words):
            Session.open(path, threads=1, cache_bytes=0, safe=is_safe)


def test_the_commands_that_look_are_safe_and_the_others_on_demand(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []
    from mars_export.runtime.bundle import open as module

    real = module.verify

    def verify(*arguments: Any, **named: Any) -> None:
        opened.append(named["safe"])
        real(*arguments, **named)

    monkeypatch.setattr(module, "verify", verify)

    def run(*words: str) -> list[bool]:
        opened.clear()
        result = CliRunner().invoke(app, [*words])
        assert result.exit_code == 0, result.output
        return list(dict.fromkeys(opened))

    bundle = str(path)
    generate = ("generate", bundle, "-p", "the inner", "-n", "2", "-t", "1")
    assert run("inspect", bundle) == [True]
    assert run("inspect", bundle, "--trust") == [False]
    assert run("doctor", bundle) == [True]
    assert run("doctor", bundle, "--trust") == [False]
    assert run(*generate) == [False]
    assert run(*generate, "--safe") == [True]
    assert run("chat", bundle, "--safe", "-n", "2", "-t", "1") == [True]


def test_a_server_of_foreign_bundles(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(*_: Any, **named: Any) -> None:
        asked.append(named["safe"])
        raise SessionError("enough")

    monkeypatch.setattr("mars_export.runtime.session.session.Session.open", stop)
    for option, due in (((), False), (("--safe",), True)):
        CliRunner().invoke(app, ["serve", str(path), "--port", "0", *option])
        assert asked.pop() is due


def test_the_limits_are_said_where_users_look() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    for limit in (SAFE_MANIFEST, SAFE_PARSED):
        assert f"{limit // 1_000_000} MB" in page
    assert f"{SAFE_FILES} files" in page
    assert json.dumps({"safe": True}).strip("{}").replace('"', "").replace(": true", "=True") in page
