"""I-DLM checkpoints (`model_type: sdar`, causal) decode as transformers' Qwen3; SDAR's own are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.agreement import NEW, PROMPTS, agrees
from support.graphs import forward
from support.oracle import Oracle, generate
from support.shell import run, succeed

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError

MASKS, BLOCK = 3, 4
STOCK = tiny.Tiny("idlm", "qwen3", {"head_dim": 20})
PADDING = 280  # a row of the embedding that no text has
CLASS = "class SDARConfig:\n    def __init__(self, block_size=4, use_regular_causal{}, **kwargs): ...\n"
Variant = Callable[..., Path]


def write(directory: Path, model: Any = None, **changes: Any) -> Path:
    """A look-alike of the authors' directories: stock Qwen3 tensors under their names."""
    tiny.save(model or tiny.build(STOCK), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (directory / name).read_text()
        (directory / name).write_text(text.replace("<|mask|>", "<|MASK|>"))
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
        "attn_implementation": "flex_attention",
        "fuse_cross_entropy": True,
        "use_cache": False,
        "mask_token_id": tiny.MASK,
        "block_size": MASKS,
        "use_regular_causal": True,
    }
    tiny.change_config(directory, **config | changes)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("idlm") / "c")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(tiny.load(STOCK, checkpoint), tiny.MASK, BLOCK)


@pytest.fixture(scope="module", params=["in-place", "appended"])
def session(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Session:
    target = tmp_path_factory.mktemp("idlm") / request.param
    succeed("onnx", checkpoint, "-o", target, "--kv-layout", request.param, "--metrics")
    return Session.open(target, threads=1, cache_bytes=0)


def test_block_and_masks_come_from_the_config(session: Session) -> None:
    manifest = session.bundle.manifest
    assert (manifest.model.type, manifest.block, manifest.masks) == ("qwen3", BLOCK, MASKS + 1)
    assert manifest.tokens.mask == tiny.MASK
    drift = manifest.variants[0].drift
    assert drift is not None and (drift.reference_library or "").startswith("transformers ")


@pytest.mark.parametrize("masks", ["full", "auto", 0, 1, 2, 5])
def test_exact_text_is_that_of_one_token(masks: Any, session: Session, oracle: Oracle) -> None:
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks=masks)
    for prompt, made in zip(PROMPTS, session.generate_batch(list(PROMPTS), config), strict=True):
        assert list(made.token_ids) == generate(oracle, prompt, 1.0, max_new=NEW).tokens


def test_a_tau_is_the_reference_sampler_with_these_masks(session: Session, oracle: Oracle) -> None:
    config = GenerationConfig(tau=0.4, max_new_tokens=NEW, eos_ids=(), masks="full")
    for prompt in PROMPTS:
        agrees(session.generate(prompt, config), generate(oracle, prompt, 0.4, max_new=NEW))


@pytest.mark.parametrize("block", [None, 8])
def test_a_step_has_at_most_one_mask_more_than_were_trained(
    block: int | None, checkpoint: Path, tmp_path: Path
) -> None:
    words = () if block is None else ("--block", block)
    assert run("onnx", checkpoint, "-o", tmp_path / "b", *map(str, words)).returncode == 0
    session = Session.open(tmp_path / "b", threads=1)
    for tau, most in ((None, MASKS + 1), (0.0, MASKS if block is None else MASKS + 1)):
        row = session.new_sequence(0, [5], GenerationConfig(tau=tau, max_new_tokens=NEW))
        row.block = session.bundle.manifest.block
        assert row.max_masks() == most


def test_predictions_are_those_of_the_training_layout(session: Session, checkpoint: Path) -> None:
    """[noisy | clean] in one forward of transformers' Qwen3: a slot of a noisy block sees the clean tokens of
    earlier blocks and the noisy slots of its block up to itself; both halves have the same positions.
    """
    clean = [(31 * i + 7) % 250 for i in range(5 * MASKS)]
    size = len(clean)
    position = torch.arange(size).repeat(2)
    noisy = torch.arange(2 * size) < size
    block = position // MASKS
    sees = (~noisy[:, None] & ~noisy[None] & (position[:, None] >= position[None])) | (
        noisy[:, None]
        & torch.where(
            noisy[None],
            (block[:, None] == block[None]) & (position[:, None] >= position[None]),
            block[None] < block[:, None],
        )
    )
    bias = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
    ids = torch.tensor([[tiny.MASK] * size + clean])
    with torch.inference_mode():
        trained = tiny.load(STOCK, checkpoint)(
            ids, attention_mask=bias, position_ids=position[None], use_cache=False
        )
    theirs = trained.logits[0].numpy()
    for start in range(MASKS, size, MASKS):
        *_, ours = forward(session, clean[:start] + [tiny.MASK] * MASKS, (start,))
        kept = np.arange(tiny.VOCAB_SIZE) != tiny.MASK
        np.testing.assert_allclose(ours[start:, kept], theirs[start : start + MASKS, kept], atol=1e-4)
        np.testing.assert_allclose(ours[:start, kept], theirs[size : size + start, kept], atol=1e-4)


@pytest.mark.parametrize("declared", [None, True])
def test_what_says_that_attention_is_causal(declared: bool | None, tmp_path: Path) -> None:
    directory = write(tmp_path / "c", use_regular_causal=declared)
    if declared is None:
        with pytest.raises(CheckpointError, match="SDAR's attention is bidirectional.*add --causal"):
            open_checkpoint(str(directory))
        assert open_checkpoint(str(directory), causal=True).block == BLOCK
        (directory / "configuration_sdar.py").write_text("raise SystemExit\n" + CLASS.format("=True"))
    assert open_checkpoint(str(directory)).trained_masks == MASKS


@pytest.mark.parametrize("default", ["=False", "=None", "", "=False,  # use_regular_causal=True\n"])
def test_a_class_that_does_not_say_so(default: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "c", use_regular_causal=None)
    (directory / "configuration_sdar.py").write_text(CLASS.format(default))
    with pytest.raises(CheckpointError, match="configuration_sdar.py does not set it to True; .*--causal"):
        open_checkpoint(str(directory))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bidirectional": ({"use_regular_causal": False}, "`use_regular_causal: False`.*to True$"),
    "relay": ({"use_relay": True}, "a relay variant of I-DLM"),
    "another mask": (
        {"mask_token_id": 7},
        r"`<\|MASK\|>` \(id 268\) by the tokenizer, and id 7 by config.json",
    ),
    "no block": ({"block_size": None}, "`block_size`, the masks of a block in training, must be 1 to 63"),
    "a text as block": ({"block_size": "3"}, "must be 1 to 63, not '3'"),
    "a huge block": ({"block_size": 64}, "must be 1 to 63, not 64"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "c", **changes)
    for causal in (False, True):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(directory), causal=causal)


def test_relay_tensors_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny.build(STOCK)
    model.register_module("relay_layer_norm", torch.nn.LayerNorm(48))
    with pytest.raises(CheckpointError, match="a relay variant of I-DLM"):
        open_checkpoint(str(write(tmp_path / "c", model)))


def test_the_mask_of_the_config_alone(tmp_path: Path) -> None:
    directory = write(tmp_path / "c", mask_token_id=PADDING)
    tiny.change_config(directory, "tokenizer_config.json", mask_token=None)
    assert open_checkpoint(str(directory)).vocabulary.mask_token_id == PADDING
    assert open_checkpoint(str(directory), mask_token="270").vocabulary.mask_token_id == 270
    tiny.change_config(directory, mask_token_id=999)
    with pytest.raises(CheckpointError, match="id 999, outside the embedding of 288 rows"):
        open_checkpoint(str(directory))
