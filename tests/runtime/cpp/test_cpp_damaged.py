"""Bundles that libmars must not believe, damaged at random, and those of which it knows only a part."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.cabi import Library, MarsStatusError
from support.cabi_session import CSession
from support.fixtures import Named
from support.twins import PROMPT

from mars_export import BundleError
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.open import open_bundle, write_manifest


def broken_bundles(directory: Path, other: Path) -> Iterator[str]:
    """Break the bundle in one way after the other; every file is whole again after each yield."""
    draw = random.Random(5)
    for name in ("model.onnx", "tokenizer.json", "weights.bin", "manifest.json", "manifest.sha256"):
        path = directory / name
        whole = path.read_bytes()
        flips = []
        for _ in range(60):
            changed = bytearray(whole)
            for place in draw.sample(range(len(whole)), 2):
                changed[place] ^= 1 << draw.randrange(8)
            flips.append(bytes(changed))
        cuts = [whole[: draw.randrange(len(whole))] for _ in range(30)]
        others = [b"", whole[:-1], whole * 2, bytes(len(whole)), (other / name).read_bytes()]
        for data in [*others, *cuts, *flips]:
            path.write_bytes(data)
            yield name
        path.unlink()
        yield f"{name} missing"
        path.mkdir()
        yield f"a directory for {name}"
        path.rmdir()
        path.write_bytes(whole)


def test_corrupted_bundles_end_in_an_error_code(library: Library, bundles: Named, tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    count = 0
    for what in broken_bundles(directory, bundles("qwen3")):
        count += 1
        try:
            open_bundle(directory)
        except BundleError:
            with pytest.raises(MarsStatusError) as error:
                CSession(library, directory, threads=1)
            assert error.value.status == 1, what
    assert count > 400
    with CSession(library, directory, threads=1, verify="always") as session:
        assert session.generate([1], max_new_tokens=2).token_ids


def test_files_that_are_hashed_but_wrong(library: Library, bundles: Named, tmp_path: Path) -> None:
    """Hashes that are right over files that are not: readers behind the manifest's must stand it too."""
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    manifest, draw = open_bundle(directory).manifest, random.Random(6)
    for name in ("model.onnx", "tokenizer.json"):
        whole = (directory / name).read_bytes()
        for i in range(40):
            changed = bytearray(whole)
            for place in draw.sample(
                range(len(whole)), 3 if name == "tokenizer.json" else 0
            ):  # a graph's values are ONNX Runtime's to check
                changed[place] = draw.randrange(256)
            (directory / name).write_bytes(changed if i % 2 else changed[: draw.randrange(len(whole))])
            write_manifest(
                directory,
                replace(manifest, files=tuple(describe(directory / e.path) for e in manifest.files)),
            )
            status = 0
            try:
                with CSession(library, directory, threads=1) as session:
                    session.generate([1, 2], max_new_tokens=3)
            except MarsStatusError as error:
                status = error.status
            assert status in (0, 1, 2)
        (directory / name).write_bytes(whole)


def test_a_tokenizer_it_does_not_know_leaves_token_ids(
    library: Library, bundles: Named, tmp_path: Path
) -> None:
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    manifest, path = open_bundle(directory).manifest, directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["type"] = "WordPiece"
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    write_manifest(
        directory, replace(manifest, files=tuple(describe(directory / e.path) for e in manifest.files))
    )
    with (
        CSession(library, directory, threads=1) as session,
        CSession(library, bundles("llama"), threads=1) as twin,
    ):
        assert (session.has_text, twin.has_text) == (False, True)
        made = session.generate(PROMPT, tau=0.4, max_new_tokens=12)
        wanted = twin.generate(PROMPT, tau=0.4, max_new_tokens=12)
        assert (made.token_ids, made.text) == (wanted.token_ids, "")
        for ask in (
            lambda: session.generate("words"),
            lambda: session.generate([{"role": "user", "content": "x"}]),
            lambda: session.generate(PROMPT, stop=["x"]),
            lambda: session.decode([1, 2]),
        ):
            with pytest.raises(
                MarsStatusError, match=r"only BPE is supported, not `WordPiece`(.|\n)*token ids"
            ):
                ask()
