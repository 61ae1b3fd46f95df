"""A PEFT adapter over a base checkpoint: which base, which tokenizer, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import lora, tiny
from support.fixtures import Named

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError


@pytest.fixture
def adapter(checkpoints: Named, tmp_path: Path) -> Path:
    return lora.write_adapter(checkpoints("llama"), tmp_path / "adapter", tiny.TINIES["llama"])


@pytest.mark.parametrize("recorded", ["/moved/away", None])
def test_another_base_can_be_named(recorded: str | None, adapter: Path, checkpoints: Named) -> None:
    tiny.change_config(adapter, "adapter_config.json", base_model_name_or_path=recorded)
    with pytest.raises(CheckpointError, match="/moved/away: not a directory|name the base with --base"):
        open_checkpoint(str(adapter))
    assert open_checkpoint(str(adapter), base=str(checkpoints("llama"))).model == checkpoints("llama")


def test_the_adapter_s_own_tokenizer_wins(adapter: Path) -> None:
    tiny.write_tokenizer(adapter)
    tiny.change_config(adapter, "tokenizer_config.json", mask_token="<|endoftext|>", chat_template="mine")
    vocabulary = open_checkpoint(str(adapter)).vocabulary
    assert (vocabulary.mask_token_id, vocabulary.chat_template) == (tiny.ENDOFTEXT, "mine")


@pytest.mark.parametrize("base", ["mistral", "qwen3"])
def test_a_wrong_base_is_refused(base: str, adapter: Path, checkpoints: Named) -> None:
    message = r"the adapter does not fit its base model:\n  model.layers.0.self_attn.[qkvo]_proj.weight is"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(adapter), base=str(checkpoints(base)))


def test_tensors_without_a_place_in_the_base_are_named(checkpoints: Named, tmp_path: Path) -> None:
    name = "qwen3-mixed"
    adapter = lora.write_adapter(checkpoints(name), tmp_path / "adapter", tiny.TINIES[name])
    message = "adapter tensors that do not belong to the base model: .*layers.2.*is this the right base"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(adapter), base=str(checkpoints("a2d-qwen2")))


MERGE = "cannot be merged while streaming; merge it first: `model.merge_and_unload"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True, "bias": "lora_only"}, f"DoRA, bias=lora_only {MERGE}"),
        ({"kasa_config": {"beta": 1}}, f"KaSA {MERGE}"),
        ({"use_bdlora": {"beta": 1}}, f"block-diagonal LoRA {MERGE}"),
        ({"arrow_config": {"beta": 1}}, f"Arrow {MERGE}"),
        ({"init_lora_weights": "loftq"}, f"init_lora_weights=loftq, which changes .* {MERGE}"),
        ({"init_lora_weights": "something new"}, f"init_lora_weights=something new, .* {MERGE}"),
        ({"peft_type": "IA3"}, f"peft_type IA3 {MERGE}"),
        ({"r": 0}, "`r` is 0"),
        ({"lora_alpha": "x"}, "adapter_config.json"),
        ({"alpha_pattern": [1]}, "adapter_config.json"),
        ({"alpha_pattern": {"(": 1}}, "adapter_config.json"),
        ({"trainable_token_indices": {"embed_tokens": 3}}, "adapter_config.json"),
        ({"trainable_token_indices": 5}, "adapter_config.json"),
    ],
    ids=str,
)
def test_a_config_that_is_not_reproduced(changes: dict[str, Any], message: str, adapter: Path) -> None:
    tiny.change_config(adapter, "adapter_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(adapter))


def test_an_adapter_without_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors beside adapter_config.json"):
        open_checkpoint(str(adapter))
