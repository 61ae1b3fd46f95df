"""Bundles with draft adapters, and without masks: libmars gives Python's text, by the same steps."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.cabi import Library, MarsStatusError, build
from support.cabi_session import CSession
from support.fixtures import Named
from support.twins import PROMPT, SAMPLINGS

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import DraftInfo, Manifest
from mars_export.runtime.bundle.open import open_bundle, write_manifest

NAMES = ("one", "two")
CHAT = [{"role": "user", "content": "the éclair"}]


def changed(source: Path, target: Path, change: Callable[[Manifest], Manifest]) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    manifest = change(open_bundle(source).manifest)
    write_manifest(
        target, replace(manifest, files=tuple(describe(target / entry.path) for entry in manifest.files))
    )
    return target


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


@pytest.fixture(scope="module", params=["mask", "noise"])
def gated(request: pytest.FixtureRequest, bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = bundles("llama"), tmp_path_factory.mktemp("gated") / "bundle"

    def change(manifest: Manifest) -> Manifest:
        for name in manifest.graphs:
            drafting(target / name, manifest.model.vocab_size)
        low, high = (7, 8) if request.param == "mask" else (3, manifest.model.vocab_size)
        tokens = replace(manifest.tokens, mask=None)
        return replace(manifest, tokens=tokens, masks=5, draft=DraftInfo(NAMES, low, high))

    return changed(source, target, change)


@pytest.fixture(scope="module")
def maskless(bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(
        bundles("llama"),
        tmp_path_factory.mktemp("maskless") / "bundle",
        lambda manifest: replace(manifest, tokens=replace(manifest.tokens, mask=None), masks=0),
    )


def run(*arguments: object) -> dict[str, Any]:
    command = [build() / "mars-run", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_draft_adapter_changes_the_steps_and_not_the_text(
    sampling: dict[str, Any], gated: Path, library: Library
) -> None:
    python, steps = Session.open(gated, threads=1, cache_bytes=0), []
    asked = {"max_new_tokens": 30, "eos_ids": (), **sampling}
    with CSession(library, gated, threads=1) as session:
        one = session.generate(PROMPT, tau=1.0, **asked)
        for name in (None, *NAMES):
            wanted = python.generate(PROMPT, GenerationConfig(draft=name, window="full", **asked))  # type: ignore[arg-type]
            made = session.generate(PROMPT, window="full", **asked, **({"draft": name} if name else {}))
            assert made.token_ids == tuple(wanted.token_ids) == one.token_ids
            stats = wanted.stats
            assert (made.forwards, made.verified) == (stats.forwards, stats.verified)
            steps.append((made.forwards, made.proposed, made.verified, made.accepted))
    assert steps[0] == steps[1]


def test_rows_of_several_adapters_share_a_batch_and_the_prefix_cache(gated: Path, library: Library) -> None:
    prompt = [i % 250 for i in range(300)]
    settings = [{"max_new_tokens": 20, "eos_ids": (), "draft": name} for name in (*NAMES, *NAMES)]
    with CSession(library, gated, threads=1, cache_bytes=1 << 24) as session:
        wanted = session.generate(prompt, tau=1.0, max_new_tokens=20, eos_ids=())
        made = session.generate_batch([prompt] * 4, settings)
        assert {answer.token_ids for answer in made} == {wanted.token_ids}
        again = session.generate(prompt, **settings[1])
        assert again.token_ids == wanted.token_ids and again.cached_tokens > 0


def test_mars_run_names_an_adapter(gated: Path) -> None:
    python = Session.open(gated, threads=1, cache_bytes=0)
    for name in NAMES:
        wanted = python.generate(CHAT, GenerationConfig(max_new_tokens=20, draft=name))
        made = run(gated, "-p", "the éclair", "--draft", name, "--max-new-tokens", 20)
        assert (made["token_ids"], made["text"]) == (list(wanted.token_ids), wanted.text)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tau": 0.9}, "its drafts were trained to be verified"),
        ({"draft": "three"}, "no draft adapter 'three'; it has one, two"),
    ],
)
def test_what_a_bundle_with_draft_adapters_refuses(
    config: dict[str, Any], words: str, gated: Path, library: Library
) -> None:
    with pytest.raises(SessionError, match=words):
        Session.open(gated, threads=1).generate(PROMPT, GenerationConfig(**config))
    with CSession(library, gated, threads=1) as session:
        info = session.info
        assert [name.decode() for name in info.draft_adapters[: info.num_draft_adapters]] == [*NAMES]
        assert info.mask_id == -1
        with pytest.raises(MarsStatusError, match=words):
            session.generate(PROMPT, **config)


def test_a_bundle_without_masks_gives_the_one_token_text(maskless: Path, library: Library) -> None:
    python = Session.open(maskless, threads=1, cache_bytes=0)
    with CSession(library, maskless, threads=1) as session:
        for prompt in (PROMPT, [5, 6, 7] * 8):
            one = session.generate(prompt, tau=1.0, max_new_tokens=30, eos_ids=())
            for asked in ({}, {"lookup": 1}):
                asked |= {"max_new_tokens": 30, "eos_ids": ()}
                made = session.generate(prompt, window="full", **asked)
                wanted = python.generate(prompt, GenerationConfig(window="full", **asked))  # type: ignore[arg-type]
                assert made.token_ids == tuple(wanted.token_ids) == one.token_ids
                assert (made.forwards, made.proposed) == (wanted.stats.forwards, wanted.stats.proposed)
        with pytest.raises(MarsStatusError, match="no draft adapter 'one'; it has none"):
            session.generate(PROMPT, draft="one")
        with pytest.raises(MarsStatusError, match="exported without masks"):
            session.generate(PROMPT, tau=0.9)
