"""Bundles without masks: libmars gives Python's text, by the same steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cabi import Library, MarsStatusError, build
from support.cabi_session import CSession
from support.fixtures import Named
from support.shell import call
from support.tiny import without_mask
from support.twins import PROMPT

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions

CHAT = [{"role": "user", "content": "the éclair"}]


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
        with pytest.raises(MarsStatusError, match="exported without masks"):
            session.generate(PROMPT, tau=0.9)
