"""Bundles with draft adapters, and without masks: libmars gives Python's text, by the same steps."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import cpp_service
from support.cabi import Library, MarsStatusError, build
from support.cabi_session import CSession
from support.cpp_service import post, start
from support.drafting import NAMES, profile_of, with_adapters
from support.fixtures import Named
from support.shell import call
from support.tiny import without_mask
from support.twins import PROMPT, SAMPLINGS

from mars_export import BundleError, GenerationConfig, Session, SessionError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.open import open_bundle, write_manifest

CHAT = [{"role": "user", "content": "the éclair"}]


@pytest.fixture(scope="module", params=["mask", "noise"])
def gated(request: pytest.FixtureRequest, bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    low, high = (7, 8) if request.param == "mask" else (3, None)
    return with_adapters(bundles("llama"), tmp_path_factory.mktemp("gated") / "bundle", low, high)


@pytest.fixture(scope="module")
def maskless(checkpoints: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with `--no-masks`."""
    root = tmp_path_factory.mktemp("maskless")
    stock = without_mask(shutil.copytree(checkpoints("llama"), root / "stock"))
    export_onnx(open_checkpoint(str(stock), masks=False), root / "bundle", ExportOptions())
    return root / "bundle"


def run(*arguments: object) -> dict[str, Any]:
    command = [build() / "mars-run", *map(str, arguments), "--json"]
    done = call(*command)
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
            wanted = python.generate(PROMPT, GenerationConfig(draft=name, masks="full", **asked))  # type: ignore[arg-type]
            made = session.generate(PROMPT, masks="full", **asked, **({"draft": name} if name else {}))
            assert made.token_ids == tuple(wanted.token_ids) == one.token_ids
            stats = wanted.stats
            assert (made.forwards, made.accepted_draft_tokens) == (
                stats.forwards,
                stats.accepted_draft_tokens,
            )
            steps.append((made.forwards, made.draft_tokens, made.accepted_draft_tokens, made.accepted))
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


@pytest.fixture
def profiled(bundles: Named, tmp_path: Path) -> Path:
    path = with_adapters(bundles("llama"), tmp_path / "bundle")
    profiles.store(path, profile_of(path))
    return path


def test_a_profile_chooses_the_adapter(profiled: Path, library: Library) -> None:
    steps, chat = {}, [{"role": "user", "content": "the apple"}]
    for name in NAMES:
        config = GenerationConfig(max_new_tokens=20, draft=name, masks=2)
        steps[name] = (
            Session.open(profiled, threads=1, cache_bytes=0).generate(chat, config).stats.draft_tokens
        )
    assert steps["one"] != steps["two"]
    asked = ("-p", "the apple", "--max-new-tokens", 20, "--profile", "words")
    assert run(profiled, *asked)["stats"]["draft_tokens"] == steps["two"]
    assert run(profiled, *asked, "--draft", "one")["stats"]["draft_tokens"] == steps["one"]
    with CSession(library, profiled, threads=1) as session:
        assert session.profile("words") == {"tau": -1.0, "metric": 0, "masks": 2, "draft": b"two"}
    process, port = start(profiled)
    try:
        models = json.loads(cpp_service.call(port, "/v1/models")[1])["data"]
        assert [model["id"].partition(":")[2] for model in models] == ["", "words"]
        assert models[0]["mars"]["drafts"] == [*NAMES]
        body = {"model": models[1]["id"], "messages": chat, "max_tokens": 20}
        answer = json.loads(post(port, body)[1])
        tokens = answer["usage"]["completion_tokens_details"]
        assert sum(tokens.values()) == steps["two"]
        assert (answer["mars"]["exact"], answer["mars"]["profile"]) == (True, "words")
    finally:
        process.terminate()
        process.wait(60)


def test_a_profile_of_an_adapter_that_is_not_there(profiled: Path, library: Library) -> None:
    manifest = open_bundle(profiled).manifest
    write_manifest(profiled, replace(manifest, profiles=(profile_of(profiled, "three"),)))
    words = r"profile `words` is for the draft adapter `three`, which is not there \(there are: one, two\)"
    with pytest.raises(BundleError, match=words):
        Session.open(profiled)
    with pytest.raises(MarsStatusError, match=words), CSession(library, profiled):
        pass


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
            for asked in ({}, {"prompt_lookup": 1}):
                asked |= {"max_new_tokens": 30, "eos_ids": ()}
                made = session.generate(prompt, masks="full", **asked)
                wanted = python.generate(prompt, GenerationConfig(masks="full", **asked))  # type: ignore[arg-type]
                assert made.token_ids == tuple(wanted.token_ids) == one.token_ids
                assert (made.forwards, made.draft_tokens) == (
                    wanted.stats.forwards,
                    wanted.stats.draft_tokens,
                )
        config = GenerationConfig(max_new_tokens=20, prompt_lookup=1, masks="full")
        alone = python.generate(CHAT, config)
        asked = ("-p", "the éclair", "--max-new-tokens", 20, "--prompt-lookup", 1, "--masks", "full")
        found = run(maskless, *asked)
        assert (found["token_ids"], found["text"]) == (list(alone.token_ids), alone.text)
        assert found["stats"]["draft_tokens"] == alone.stats.draft_tokens
        with pytest.raises(MarsStatusError, match="no draft adapter 'one'; it has none"):
            session.generate(PROMPT, draft="one")
        with pytest.raises(MarsStatusError, match="exported without masks"):
            session.generate(PROMPT, tau=0.9)
