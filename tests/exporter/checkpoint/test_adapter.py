"""A PEFT adapter over a base checkpoint: merged as peft merges it, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from support import tiny
from support.fixtures import Named

from mars_export.exporter.checkpoint.open import Checkpoint, open_checkpoint
from mars_export.runtime.errors import CheckpointError

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(base: Path, name: str, directory: Path, **settings: Any) -> torch.nn.Module:
    """Write an adapter with random weights to `directory`; returns peft's own merge of it."""
    model = tiny.load(tiny.TINIES[name], base)
    config = peft.LoraConfig(
        **({"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM"} | settings)
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.3 * torch.randn_like(parameter)
                ) if "lora_" not in parameter_name else parameter.normal_(0, 0.2)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(directory)
    return adapted.merge_and_unload()


def agrees(checkpoint: Checkpoint, merged: torch.nn.Module) -> None:
    state = merged.state_dict()
    for name in checkpoint.tensors.shapes:
        assert checkpoint.tensors.shapes[name] == tuple(state[name].shape)
        np.testing.assert_allclose(
            np.asarray(checkpoint.tensors.read(name)), state[name].numpy(), atol=2e-6, err_msg=name
        )


SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7},
        "alpha_pattern": {"v_proj": 11, "layers.0.mlp.up_proj": 3},
    },
    "some layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "mask row": {"trainable_token_indices": [tiny.MASK]},
    "mask row by name": {"trainable_token_indices": {"embed_tokens": [tiny.MASK, 7]}},
    "whole modules": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("name", ["llama", "a2d-qwen2", "llama-bias"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_merge_is_that_of_peft(
    settings: dict[str, Any], name: str, checkpoints: Named, tmp_path: Path
) -> None:
    merged = train(checkpoints(name), name, tmp_path / "adapter", **settings)
    agrees(open_checkpoint(str(tmp_path / "adapter")), merged)


@pytest.mark.parametrize("recorded", ["/moved/away", None])
def test_another_base_can_be_named(recorded: str | None, checkpoints: Named, tmp_path: Path) -> None:
    merged = train(checkpoints("llama"), "llama", tmp_path / "adapter")
    tiny.change_config(tmp_path / "adapter", "adapter_config.json", base_model_name_or_path=recorded)
    with pytest.raises(CheckpointError, match="/moved/away: not a directory|name the base with --base"):
        open_checkpoint(str(tmp_path / "adapter"))
    agrees(open_checkpoint(str(tmp_path / "adapter"), base=str(checkpoints("llama"))), merged)


def test_the_adapter_s_own_tokenizer_wins(checkpoints: Named, tmp_path: Path) -> None:
    train(checkpoints("llama"), "llama", tmp_path / "adapter")
    tiny.write_tokenizer(tmp_path / "adapter")
    tiny.change_config(
        tmp_path / "adapter", "tokenizer_config.json", mask_token="<|endoftext|>", chat_template="mine"
    )
    vocabulary = open_checkpoint(str(tmp_path / "adapter")).vocabulary
    assert (vocabulary.mask_token_id, vocabulary.chat_template) == (tiny.ENDOFTEXT, "mine")


@pytest.mark.parametrize("base", ["mistral", "qwen3"])
def test_a_wrong_base_is_refused(base: str, checkpoints: Named, tmp_path: Path) -> None:
    train(checkpoints("llama"), "llama", tmp_path / "adapter")
    with pytest.raises(
        CheckpointError,
        match=r"the adapter does not fit its base model:\n  model.layers.0.self_attn.[qkvo]_proj.weight is",
    ):
        open_checkpoint(str(tmp_path / "adapter"), base=str(checkpoints(base)))


def test_tensors_without_a_place_in_the_base_are_named(checkpoints: Named, tmp_path: Path) -> None:
    train(checkpoints("qwen3-mixed"), "qwen3-mixed", tmp_path / "adapter")
    with pytest.raises(
        CheckpointError,
        match=r"adapter tensors that do not belong to the base model: .*layers.2.*is this the right base",
    ):
        open_checkpoint(str(tmp_path / "adapter"), base=str(checkpoints("a2d-qwen2")))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias=all"),
        ({"use_dora": True, "bias": "lora_only"}, "DoRA, bias=lora_only"),
    ],
)
def test_what_cannot_be_merged_while_streaming_is_refused(
    settings: dict[str, Any], what: str, checkpoints: Named, tmp_path: Path
) -> None:
    train(checkpoints("llama"), "llama", tmp_path / "adapter", **settings)
    with pytest.raises(
        CheckpointError,
        match=f"{what} cannot be merged while streaming; merge it first: `model.merge_and_unload",
    ):
        open_checkpoint(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 cannot be merged"),
        ({"base_model_name_or_path": None}, "no `base_model_name_or_path`; name the base with --base"),
        ({"r": 0}, "`r` is 0"),
        ({"lora_alpha": "x"}, "adapter_config.json"),
        ({"alpha_pattern": [1]}, "adapter_config.json"),
        ({"alpha_pattern": {"(": 1}}, "adapter_config.json"),
        ({"trainable_token_indices": {"embed_tokens": 3}}, "adapter_config.json"),
        ({"trainable_token_indices": 5}, "adapter_config.json"),
    ],
)
def test_a_senseless_adapter_config(
    changes: dict[str, Any], message: str, checkpoints: Named, tmp_path: Path
) -> None:
    train(checkpoints("llama"), "llama", tmp_path / "adapter")
    tiny.change_config(tmp_path / "adapter", "adapter_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "adapter"))


def test_an_adapter_without_weights(checkpoints: Named, tmp_path: Path) -> None:
    train(checkpoints("llama"), "llama", tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors beside adapter_config.json"):
        open_checkpoint(str(tmp_path / "adapter"))
