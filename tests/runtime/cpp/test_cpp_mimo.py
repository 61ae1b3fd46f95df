"""Bundles with an MTP layer, MiMo's and Qwen3.5's: libmars gives Python's text, by the same steps and the
same draft tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import mimo, qwen_mtp
from support.agreement import PROMPTS
from support.cabi import Library, MarsStatusError
from support.cabi_session import CSession
from support.exports import export
from support.twins import SAMPLINGS, same_steps

from mars_export import GenerationConfig, Session
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.bundle.open import write_manifest
from mars_export.runtime.structured.stored_grammars import compile_into

SETTINGS: dict[str, dict[str, Any]] = {
    "mimo": {},
    "qwen-mtp": {"shortlist": 280},
    "qwen-mtp-tied": {"precision": "w8a8", "kv": "int8", "shortlist": 250, "allow_drift": True},
}


@pytest.fixture(scope="module", params=SETTINGS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, name = tmp_path_factory.mktemp("mtp"), request.param
    if name == "mimo":
        mimo.write(root / "checkpoint", PROMPTS, 44)
    else:
        qwen_mtp.write(root / "checkpoint", name, PROMPTS, 44)
    export(root / "checkpoint", root / f"{name}.bundle", block=4, **SETTINGS[name])
    compile_into(root / f"{name}.bundle", "words", GenerationConfig(regex="(the|in|a)( [a-z]{2,9}){3,6}"))
    return root / f"{name}.bundle"


@pytest.mark.parametrize("settings", [*SAMPLINGS, {"prompt_lookup": 2}, {"grammar": "words"}], ids=str)
def test_libmars_takes_the_steps_of_python(settings: dict[str, Any], bundle: Path, library: Library) -> None:
    name = bundle.name.removesuffix(".bundle")
    python = Session.open(bundle, threads=1, cache_bytes=0)
    asked = {"max_new_tokens": 30, "eos_ids": (), "masks": "full", **settings}
    accepted = 0
    with CSession(library, bundle, threads=1) as session:
        for prompt in PROMPTS:
            accepted += same_steps(python, session, prompt, asked).accepted_draft_tokens
    assert settings or accepted > (40 if name != "qwen-mtp-tied" else 5)


def test_a_manifest_with_other_drafts_than_the_graphs_is_refused(
    bundle: Path, library: Library, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    values = json.loads((bundle / "manifest.json").read_text())
    values["model"]["mtp_drafts"] -= 1
    write_manifest(tmp_path / "b", parse_manifest(json.dumps(values)))
    with pytest.raises(MarsStatusError, match="disagree about confidence, logits, token_ids"):
        CSession(library, tmp_path / "b", threads=1)


def test_a_layer_whose_numbers_overflow_costs_speed_only(library: Library, tmp_path: Path) -> None:
    qwen_mtp.write(tmp_path / "c", "qwen-mtp", PROMPTS, 44)
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    tensors["mtp.fc.weight"] *= 1e38
    save_file(tensors, tmp_path / "c" / "model.safetensors", {"format": "pt"})
    export(tmp_path / "c", tmp_path / "b", block=4, reference=False)
    asked = {"max_new_tokens": 9, "eos_ids": ()}
    with CSession(library, tmp_path / "b", threads=1) as session:
        for prompt in PROMPTS:
            one = session.generate(prompt, tau=1.0, **asked)
            assert session.generate(prompt, **asked).token_ids == one.token_ids


def test_a_ragged_batch_has_the_texts_of_single_answers(bundle: Path, library: Library) -> None:
    asked = {"max_new_tokens": 30, "eos_ids": ()}
    with CSession(library, bundle, threads=1, cache_bytes=1 << 22) as session:
        batch = session.generate_batch([list(prompt) for prompt in PROMPTS], [asked] * len(PROMPTS))
        for prompt, made in zip(PROMPTS, batch, strict=True):
            assert made.token_ids == session.generate(prompt, tau=1.0, **asked).token_ids
            assert made.forwards < 30 or bundle.name == "qwen-mtp-tied.bundle"  # rounded: an unknown text
