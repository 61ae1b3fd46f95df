"""Qwen3.5's MTP layer and its shortlist (exporter/graph/mtp.py): the text is transformers', and the draft
tokens are those of a layer in plain torch.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import qwen_mtp, tiny
from support.exports import export
from support.paths import ROOT

from mars_export import GenerationConfig, Limits, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.quantize.text import shortlist
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.decode.schedule import run
from mars_export.runtime.errors import CheckpointError

NEW = 24
Open = Callable[..., Session]
_draw = random.Random(1)
# The layer knows the texts of the first ones.
KNOWN = [[_draw.randrange(1, 250) for _ in range(6)] for _ in range(16)]
LENGTHS = (1, 9, 33, 60)
OTHERS = [[_draw.randrange(1, 250) for _ in range(LENGTHS[i % 4])] for i in range(184)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, qwen_mtp.Layer]]:
    root = tmp_path_factory.mktemp("qwen")
    return cache(lambda name: (root / name, qwen_mtp.write(root / name, name, KNOWN, 6 + NEW)))


@pytest.fixture(scope="module")
def opened(written: Any) -> Open:
    """A session of a bundle with 3 draft tokens a step."""

    @cache
    def bundle(name: str, tokens: int, precision: str, kv: str) -> Path:
        target = written(name)[0].with_name(f"{name}-{tokens}-{precision}-{kv}.bundle")
        rounded = {"precision": precision, "kv": kv, "allow_drift": precision != "fp32"}
        export(written(name)[0], target, block=4, shortlist=tokens, **rounded)
        return target

    return lambda name="qwen-mtp", tokens=250, precision="fp32", kv="float": Session.open(
        bundle(name, tokens, precision, kv), threads=1
    )


@pytest.mark.parametrize(("name", "tokens"), [("qwen-mtp", 250), ("qwen-mtp-tied", 288)])
def test_exact_text_is_that_of_transformers_in_ragged_batches(
    name: str, tokens: int, opened: Open, written: Any
) -> None:
    session, model = opened(name, tokens), tiny.load(qwen_mtp.TINIES[name], written(name)[0])
    prompts = [*KNOWN, *OTHERS]
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks="full")
    ones = list(session.generate_each(prompts, config.with_values(tau=1.0)))
    # Answers of several lengths: rows end, and others move to their places.
    seqs = [
        session.new_sequence(i, prompt, config.with_values(max_new_tokens=NEW - 5 * (i % 3)))
        for i, prompt in enumerate(prompts)
    ]
    for _ in run(session.schedule(Limits(max_rows=8, prefill_tokens=16)), seqs):
        pass
    for seq, prompt, one in zip(seqs, prompts, ones, strict=True):
        assert seq.tokens[len(prompt) :] == [*one.token_ids][: seq.config.max_new_tokens]
    for length in (6, *LENGTHS):
        same = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        theirs = qwen_mtp.greedy(model, [prompts[i] for i in same], NEW)
        assert [[*ones[i].token_ids] for i in same] == theirs
    stats = [seq.stats for seq in seqs[: len(KNOWN)]]
    assert sum(s.tokens for s in stats) > 1.7 * sum(s.forwards for s in stats)
    assert sum(seq.stats.rejected_draft_tokens for seq in seqs) > 1000


@pytest.mark.parametrize(
    ("precision", "kv", "share"),
    [("fp32", "float", 1.0), ("w8a8", "float", 0.7), ("w8a8", "int8", 0.7), ("w4a8", "int8", 0.1)],
)
@pytest.mark.parametrize("name", qwen_mtp.TINIES)
def test_draft_tokens_are_those_of_the_layer_among_the_shortlist(
    name: str, precision: str, kv: str, share: float, opened: Open, written: Any
) -> None:
    """After whole prompts, and then after right and wrong draft tokens."""
    layer, session = written(name)[1], opened(name, 250, precision, kv)
    among = shortlist(open_checkpoint(str(written(name)[0])), 250)
    assert session.bundle.manifest.model.mtp_shortlist == len(among) == 250
    cache = session.backend.new_cache(2)
    cache.reserve(64)
    same: list[bool] = []

    def compare(found: np.ndarray, text: list[int]) -> None:
        wanted = layer.drafts(text, 3, among)
        same.extend(a == b for a, b in zip(found.tolist(), wanted, strict=True))

    for first, second in zip(KNOWN[::2], KNOWN[1::2], strict=True):
        made = qwen_mtp.greedy(layer.model, [first, second], NEW)
        texts = [[*first, *made[0]], [*second, *made[1]]]
        inputs = StepInput(np.array([t[:6] for t in texts]), np.zeros(2, int), np.full((2, 1), 5))
        found = session.backend.step(cache, 0, inputs, False).token_ids
        for row, text in zip(found, texts, strict=True):
            if row[0] == text[6]:
                compare(row[1:], text[:7])
        wrong = [text[6:10] for text in texts]
        wrong[1][2] = (wrong[1][2] + 1) % 250
        inputs = StepInput(np.array(wrong), np.full(2, 6), np.tile(np.arange(4), (2, 1)))
        found = session.backend.step(cache, 0, inputs, False).token_ids
        for row, text, accepted in zip(found, texts, (3, 1), strict=True):
            if row[: accepted + 1].tolist() == text[7 : 8 + accepted]:
                compare(row[-3:], text[: 8 + accepted])
    assert len(same) > 10 and sum(same) >= share * len(same)


@pytest.mark.parametrize(("precision", "kv"), [("w8a8", "float"), ("w8a8", "int8"), ("w4a8", "int8")])
def test_rounded_weights_give_their_own_one_token_text(precision: str, kv: str, opened: Open) -> None:
    session = opened("qwen-mtp", 250, precision, kv)
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks="full")
    ones = session.generate_each(OTHERS[:40], config.with_values(tau=1.0))
    made = session.generate_each(OTHERS[:40], config)
    assert [answer.token_ids for answer in made] == [one.token_ids for one in ones]


@pytest.mark.parametrize("settings", [{"temperature": 0.8, "seed": 5}, {"regex": "[a-f]{3}(x|yy)[0-9]{2,6}"}])
def test_other_settings_keep_the_one_token_text(settings: dict[str, Any], opened: Open) -> None:
    session, config = opened(), GenerationConfig(max_new_tokens=NEW, **settings)
    for prompt in KNOWN[:6]:
        one = session.generate(prompt, config.with_values(tau=1.0))
        assert session.generate(prompt, config).token_ids == one.token_ids


def test_the_shortlist_has_added_tokens_those_of_the_text_and_the_lowest_ids(written: Any) -> None:
    checkpoint = open_checkpoint(str(written("qwen-mtp")[0]))
    assert shortlist(checkpoint, tiny.VOCAB_SIZE) == ()
    few, more = shortlist(checkpoint, 80), shortlist(checkpoint, 200)
    assert {tiny.ENDOFTEXT, tiny.IM_END} <= {*few} < {*more} and len(few) == 80
    assert [*more] == sorted(more) and more[:20] == tuple(range(20))
    seen = [*tiny.tokenizer().encode("the market opens at six").ids]
    assert {*seen} <= {*few}


def test_a_multimodal_checkpoint_has_the_same_layer(written: Any, tmp_path: Path) -> None:
    """As Qwen3_5ForConditionalGeneration is published."""
    plain, nested = written("qwen-mtp-tied")[0], tmp_path / "nested"
    nested.mkdir()
    for path in plain.iterdir():
        (nested / path.name).write_bytes(path.read_bytes())
    tensors = load_file(plain / "model.safetensors").items()
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors}
    save_file(renamed, nested / "model.safetensors", {"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    (nested / "config.json").write_text(json.dumps(whole))
    for directory in (plain, nested):
        export(directory, tmp_path / f"{directory.name}.bundle", block=4, reference=False)
    for file in ("weights.bin", "model.onnx"):
        made = [(tmp_path / f"{d.name}.bundle" / file).read_bytes() for d in (plain, nested)]
        assert made[0] == made[1]


def test_a_layer_that_is_lost_or_not_wanted_is_left_out(written: Any, tmp_path: Path) -> None:
    directory, _ = written("qwen-mtp")
    found = open_checkpoint(str(directory))
    assert found.dims.mtp is not None and found.block == 4
    assert open_checkpoint(str(directory), masks=False).dims.mtp is None
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tiny.write_tokenizer(tmp_path)  # with a mask token: the checkpoint was tuned with masks
    assert open_checkpoint(str(tmp_path)).dims.mtp is None
    tiny.without_mask(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(str(tmp_path), masks=False).dims.mtp is None
    with pytest.raises(CheckpointError, match="needs --no-masks"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"mtp_num_hidden_layers": 2}, {}, "`mtp_num_hidden_layers` must be 0 or 1"),
        ({"mtp_use_dedicated_embeddings": True}, {}, "embedding of its own"),
        ({}, {"mtp.fc.weight": None}, r"missing: mtp\.fc\.weight \[64, 128\]"),
        ({}, {"mtp.embed_tokens.weight": (8, 8)}, r"not part of .* mtp\.embed_tokens"),
    ],
)
def test_a_layer_of_another_form_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Any], words: str, written: Any, tmp_path: Path
) -> None:
    for path in written("qwen-mtp")[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = load_file(tmp_path / "model.safetensors")
    for name, shape in tensors.items():
        found.pop(name, None)
        if shape is not None:
            found[name] = torch.ones(shape)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path))


def changed(directory: Path, target: Path, name: str, factor: float) -> Path:
    """A copy of a checkpoint in which a tensor is multiplied."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | {name: tensors[name] * factor}, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_layer_whose_numbers_overflow_costs_speed_only(written: Any, tmp_path: Path) -> None:
    directory = changed(written("qwen-mtp")[0], tmp_path / "c", "mtp.fc.weight", 1e38)
    export(directory, tmp_path / "b", block=4, reference=False)
    session, config = Session.open(tmp_path / "b", threads=1), GenerationConfig(max_new_tokens=9, eos_ids=())
    ones = session.generate_each(KNOWN[:4], config.with_values(tau=1.0))
    for one, made in zip(ones, session.generate_each(KNOWN[:4], config), strict=True):
        assert made.token_ids == one.token_ids


@pytest.mark.parametrize("name", ["mtp.norm.weight", "model.norm.weight"])
def test_a_norm_that_is_not_a_number_is_named_as_in_the_checkpoint(
    name: str, written: Any, tmp_path: Path
) -> None:
    directory = changed(written("qwen-mtp")[0], tmp_path / "c", name, float("nan"))
    with pytest.raises(CheckpointError, match=f"tensor `{name}` holds NaN"):
        export(directory, tmp_path / "b", block=4, precision="w8a8", reference=False)


@pytest.mark.slow
def test_a_layer_trained_on_text_proposes_right_tokens_after_other_text(tmp_path: Path) -> None:
    """The model is trained on the documentation, and the layer on the model's own text."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = torch.tensor(tiny.tokenizer().encode(text).ids)
    model = qwen_mtp.trained(ids[: int(0.95 * len(ids))], 450)
    prompts = qwen_mtp.cuts(ids[: int(0.95 * len(ids))], 512, 16)
    texts = torch.tensor(qwen_mtp.greedy(model, prompts.tolist(), 48))
    layer = qwen_mtp.fitted(model, torch.cat([prompts, texts], 1), 150, 32)
    qwen_mtp.save(tmp_path / "checkpoint", model, layer)
    others = qwen_mtp.cuts(ids[int(0.95 * len(ids)) :], 64, 16).tolist()
    config = GenerationConfig(max_new_tokens=48, eos_ids=(), masks="full")
    theirs = qwen_mtp.greedy(model, others, 48)
    for precision, least in (("fp32", 2.2), ("w8a8", 2.2), ("w4a8", 1.8)):
        bundle = tmp_path / precision
        export(tmp_path / "checkpoint", bundle, block=4, precision=precision, shortlist=128, allow_drift=True)
        session = Session.open(bundle, threads=1)
        ones = session.generate_each(others, config.with_values(tau=1.0))
        made = list(session.generate_each(others, config))
        assert [answer.token_ids for answer in made] == [one.token_ids for one in ones]
        assert precision != "fp32" or [[*answer.token_ids] for answer in made] == theirs
        stats = [answer.stats for answer in made]
        assert sum(s.tokens for s in stats) > least * sum(s.forwards for s in stats)
