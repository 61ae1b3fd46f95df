"""MTP-LM checkpoints (arXiv 2602.06019): stock Llama or Qwen3 with 32 tokens `<|mtp_special_token_i|>`, the
first being the mask, and an `auto_map` to a class that is never run. Look-alikes, against the stock model's
text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.agreement import NEW, PROMPTS
from support.oracle import Oracle, generate
from support.shell import succeed
from tokenizers import AddedToken, Tokenizer

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError

K = 6  # tokens of a forward in their decoding: K - 1 masks
FIRST, PADDED = tiny.NUM_TOKENS, 384  # the first added token; tables are padded to a multiple of 128
STOCK = {
    "llama": tiny.Tiny("mtp", "llama", {"vocab_size": PADDED}),
    "qwen3": tiny.Tiny("mtp", "qwen3", {"head_dim": 20, "vocab_size": PADDED}, tied=True),
}
CODE = "raise SystemExit('code of the checkpoint was run')\n"


def write(stock: tiny.Tiny, directory: Path) -> Path:
    """The files as the authors write them: no mask is named, the stock class is only decorated."""
    tiny.without_mask(tiny.write(stock, directory))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|unused|>"])  # so that the first added token is not the tokenizer's last
    names = [f"<|mtp_special_token_{i}|>" for i in range(32)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert tokenizer.token_to_id(names[0]) == FIRST and tokenizer.get_vocab_size() <= PADDED
    (directory / "modeling.py").write_text(CODE)
    (directory / "configuration.py").write_text(CODE)
    auto = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.ForCausalLM"}
    tiny.change_config(directory, auto_map=auto)
    eos = {"eos_token_id": [tiny.IM_END, tiny.ENDOFTEXT]}
    (directory / "generation_config.json").write_text(json.dumps(eos))
    return directory


@pytest.fixture(scope="module", params=STOCK)
def stock(request: pytest.FixtureRequest) -> tiny.Tiny:
    return STOCK[request.param]


@pytest.fixture(scope="module")
def checkpoint(stock: tiny.Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(stock, tmp_path_factory.mktemp("mtp") / "checkpoint")


@pytest.fixture(scope="module")
def session(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    bundle = tmp_path_factory.mktemp("mtp") / "bundle"
    succeed("onnx", checkpoint, "-o", bundle, "--block", K, "--metrics")
    return Session.open(bundle, threads=1, cache_bytes=0)


@pytest.fixture(scope="module")
def oracle(stock: tiny.Tiny, checkpoint: Path) -> Oracle:
    return Oracle(tiny.load(stock, checkpoint), FIRST, K)


def test_the_mask_is_found_by_its_name(checkpoint: Path) -> None:
    opened = open_checkpoint(str(checkpoint))
    assert (opened.vocabulary.mask_token, opened.vocabulary.mask_token_id) == (
        "<|mtp_special_token_0|>",
        FIRST,
    )
    assert opened.vocabulary.eos_token_ids == (tiny.IM_END, tiny.ENDOFTEXT)
    other = open_checkpoint(str(checkpoint), mask_token="<|mtp_special_token_3|>")
    assert other.vocabulary.mask_token_id == FIRST + 3


@pytest.mark.parametrize("masks", ["full", "auto", 3])
def test_exact_text_is_that_of_the_stock_model(masks: Any, session: Session, oracle: Oracle) -> None:
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks=masks)
    for prompt, made in zip(PROMPTS, session.generate_batch(list(PROMPTS), config), strict=True):
        assert list(made.token_ids) == generate(oracle, prompt, 1.0, max_new=NEW).tokens


def conf_adapt(oracle: Oracle, prefix: Sequence[int], tau: float) -> tuple[int, bool]:
    """Section 4.3 of the paper: how many tokens a forward gives, the longest prefix of k predictions that all
    have at least tau, but one; and whether the first has it.
    """
    logits = oracle.logits([*prefix, *[FIRST] * (K - 1)])[len(prefix) - 1 :].clone()
    logits[:, FIRST] = -torch.inf
    sure = (torch.softmax(logits, -1).max(-1).values >= tau).tolist()
    return max(1, [*sure, False].index(False)), sure[0]


@pytest.mark.parametrize("tau", [0.2, 0.5, 0.9])
def test_tau_is_their_threshold_but_for_an_unsure_first_token(
    tau: float, session: Session, oracle: Oracle
) -> None:
    compared = 0
    for prompt in PROMPTS:
        tokens = list(prompt)
        config = GenerationConfig(tau=tau, max_new_tokens=NEW, eos_ids=(), masks="full")
        for event in session.stream(prompt, config):
            if not event.token_ids:
                continue
            count, is_first_sure = conf_adapt(oracle, tokens, tau)
            tokens += event.token_ids
            if len(tokens) - len(prompt) < NEW:  # else the limit may have cut the step
                assert len(event.token_ids) == count if is_first_sure else len(event.token_ids) >= count
                compared += is_first_sure
    assert compared >= 5


def test_a_checkpoint_with_other_tensors_is_refused_by_their_names(stock: tiny.Tiny, tmp_path: Path) -> None:
    model = tiny.build(stock)
    model.register_module("mtp_head", torch.nn.Linear(8, 8))
    tiny.save(model, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"not part of a \w+ model: mtp_head"):
        open_checkpoint(str(tmp_path / "c"))


def test_a_stock_llama_with_the_settings_of_minicpm5_needs_no_masks(tmp_path: Path) -> None:
    """MiniCPM5 is a stock `LlamaForCausalLM`: exact mode with prompt lookup gives the stock model's text."""
    made = tiny.Tiny("minicpm5", "llama", {"head_dim": 24, "num_key_value_heads": 1}, tied=True, seed=5)
    directory = tiny.without_mask(tiny.write(made, tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match="needs --no-masks"):
        open_checkpoint(str(directory))
    succeed("onnx", directory, "-o", tmp_path / "bundle", "--no-masks")
    session = Session.open(tmp_path / "bundle", threads=1, cache_bytes=0)
    oracle = Oracle(tiny.load(made, directory), tiny.MASK, 1)
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), prompt_lookup=2)
    for prompt, answer in zip(PROMPTS, session.generate_batch(list(PROMPTS), config), strict=True):
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(oracle.logits(tokens)[-1].argmax()))
        assert list(answer.token_ids) == tokens[len(prompt) :]
