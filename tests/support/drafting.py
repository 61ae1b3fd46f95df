"""A bundle with two draft adapters, made from an ordinary one without torch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import DraftInfo, Profile
from mars_export.runtime.bundle.open import open_bundle, write_manifest

NAMES = ("one", "two")


def drafting(path: Path, vocab_size: int) -> None:
    """Have the graph take draft slots: one of adapter k sees the token k + 1 after that of its id."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.input[:] = ["draft.token" if name == "input_ids" else name for name in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.array(vocab_size, np.int64), "draft.size"))
    nodes = [
        helper.make_node("Div", ["input_ids", "draft.size"], ["draft.owner"]),
        helper.make_node("Add", ["input_ids", "draft.owner"], ["draft.shifted"]),
        helper.make_node("Mod", ["draft.shifted", "draft.size"], ["draft.token"]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    onnx.save(model, path)


def with_adapters(source: Path, target: Path, low: int = 7, high: int | None = 8) -> Path:
    """A copy of a bundle with the adapters NAMES. `high`: None for the vocabulary's size."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    manifest = open_bundle(source).manifest
    size = manifest.model.vocab_size
    for name in manifest.graphs:
        drafting(target / name, size)
    files = tuple(describe(target / entry.path) for entry in manifest.files)
    tokens, draft = replace(manifest.tokens, mask=None), DraftInfo(NAMES, low, high or size)
    write_manifest(target, replace(manifest, files=files, tokens=tokens, masks=5, draft=draft))
    return target


def profile_of(path: Path, draft: str = "two") -> Profile:
    """The profile `words` of an adapter, with 2 draft slots a step."""
    manifest = open_bundle(path).manifest
    settings = {"tau": None, "metric": "probability", "masks": 2, "draft": draft}
    return profiles.of_variant(manifest, manifest.variants[0], "words", {"task": "words"}, **settings)
