"""`--no-masks`: the text of a stock model, with draft tokens from lookup only."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.agreement import NEW, PROMPTS
from support.manifests import GOOD, changed
from support.shell import run, succeed

from mars_export import BundleError, GenerationConfig, Session, SessionError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.errors import CheckpointError

STOCK = tiny.Tiny("stock", "llama", {"head_dim": 12}, tied=True)
REPEATED = [5, 6, 7, 8, 9, 10, 11, 12] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a mask token."""
    directory = tmp_path_factory.mktemp("stock") / "c"
    tiny.save(tiny.build(STOCK), directory)
    return tiny.without_mask(directory)


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> Any:
    """transformers' greedy text of a prompt, each token by a forward of the whole text."""
    model = tiny.load(STOCK, checkpoint)

    @cache
    def answer(prompt: tuple[int, ...]) -> list[int]:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return answer


@pytest.fixture(scope="module", params=["in-place", "appended"])
def bundle(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tmp_path_factory.mktemp("stock") / str(request.param)
    words = ("--no-masks", "--kv-layout", request.param, "--metrics")
    succeed("onnx", checkpoint, "-o", target, *words)
    return target


@pytest.fixture(scope="module")
def session(bundle: Path) -> Session:
    return Session.open(bundle, threads=1, cache_bytes=0)


def test_the_manifest_has_no_mask(session: Session) -> None:
    manifest = session.bundle.manifest
    assert (manifest.tokens.mask, manifest.masks, manifest.block) == (None, 0, 8)


@pytest.mark.parametrize("masks", ["full", "auto", 0, 2])
@pytest.mark.parametrize("prompt_lookup", [0, 1, 2])
def test_the_text_is_the_model_s_own(prompt_lookup: int, masks: Any, session: Session, greedy: Any) -> None:
    prompts = [*PROMPTS, REPEATED, [tiny.MASK, 270, 287]]
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), prompt_lookup=prompt_lookup, masks=masks)
    answers = session.generate_batch(prompts, config)
    for prompt, made in zip(prompts, answers, strict=True):
        assert list(made.token_ids) == greedy(tuple(prompt))
        assert prompt_lookup or made.stats.forwards == NEW
    assert (sum(made.stats.accepted_draft_tokens for made in answers) > 0) == (prompt_lookup > 0)


def test_a_tau_is_refused(session: Session, bundle: Path) -> None:
    for config in (GenerationConfig(tau=0.9), GenerationConfig(exact=False)):
        with pytest.raises(
            SessionError, match="exported without masks: leave tau out.*or prompt_lookup gives"
        ) as caught:
            session.generate([5], config)
        assert (caught.value.code, caught.value.field) == ("unsupported_by_model", "tau")
    one = GenerationConfig(tau=1.0, max_new_tokens=4)
    assert (
        session.generate([5], one).token_ids == session.generate([5], one.with_values(exact=True)).token_ids
    )
    done = run("generate", bundle, "-p", "the", "--tau", "0.9")
    assert done.returncode != 0 and "exported without masks" in done.stderr


def test_doctor_and_inspect_run_on_it(bundle: Path) -> None:
    assert "opens on cpu and decodes (4 step(s))" in run("doctor", bundle).stdout
    assert "no mask, end ids" in run("inspect", bundle).stdout


def test_words_that_exclude_each_other(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="--mask-token has no effect without masks; leave it out"):
        open_checkpoint(str(checkpoint), masks=False, mask_token="7")
    with pytest.raises(CheckpointError, match="not tuned with masks needs --no-masks"):
        open_checkpoint(str(checkpoint))


def test_a_null_mask_needs_masks_0() -> None:
    assert parse_manifest(changed("masks", 3)).masks == 3
    assert GOOD.masks is None
    for masks in (None, 1):
        text = changed("tokens.mask", None)
        with pytest.raises(BundleError, match="tokens.mask: null is valid only with masks 0"):
            parse_manifest(json.dumps({**json.loads(text), "masks": masks}))
    for masks in (-1, 4097, "0"):
        with pytest.raises(BundleError, match="masks: an integer of 0 to 4096 is expected"):
            parse_manifest(changed("masks", masks))
