"""What is too much in a bundle is too much for both: the same manifests, refused alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.cabi import Library, MarsStatusError
from support.cabi_session import CSession

from mars_export import BundleError
from mars_export.runtime.bundle.open import open_bundle

Change = Callable[[dict[str, Any]], Any]


def seal(path: Path, text: str) -> None:
    (path / "manifest.json").write_text(text)
    digest = sha256((path / "manifest.json").read_bytes()).hexdigest()
    (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def many(name: str, num: int, each: Any) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        manifest[name] = [each] * num

    return change


TOO_MUCH: dict[str, Change] = {
    "variants: .*at most 64 entries": many("variants", 65, {}),
    "files: .*at most 1000 entries": many("files", 1001, {}),
    "profiles: .*at most 10000 entries": many("profiles", 10001, {}),
    "grammars: .*at most 256 entries": many("grammars", 257, {}),
    "outputs: .*at most 16 entries": lambda m: m["variants"][0].update(outputs=["x"] * 17),
    "tokens.eos: .*at most 100000 entries": lambda m: m["tokens"].update(eos=[1] * 1_000_000),
}


@pytest.mark.parametrize("words", TOO_MUCH)
def test_lists_of_a_manifest(words: str, library: Library, path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    TOO_MUCH[words](manifest)
    seal(path, json.dumps(manifest))
    with pytest.raises(BundleError, match=words):
        open_bundle(path)
    with pytest.raises(MarsStatusError, match=words):
        CSession(library, path)


def test_a_name_that_is_given_twice(library: Library, path: Path) -> None:
    """Of which one reader may take the first and another the last."""
    text = (path / "manifest.json").read_text()
    seal(path, text.replace('"mask"', '"m\\u0061sk": 3, "mask"', 1))
    with pytest.raises(BundleError, match="the name 'mask' is given twice"):
        open_bundle(path)
    with pytest.raises(MarsStatusError, match="the name `mask` is given twice"):
        CSession(library, path)
