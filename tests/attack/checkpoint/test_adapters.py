"""Adapters made to hurt: low-rank pairs that are none, and fields of other types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.hostile import refused


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"self_attn.q_proj.lora_A": (0, 48), "self_attn.q_proj.lora_B": (48, 0)}, "does not fit"),
        ({"self_attn.q_proj.lora_A": (), "self_attn.q_proj.lora_B": (48, 4)}, "does not fit"),
        ({"input_layernorm.lora_A": (4, 48), "input_layernorm.lora_B": (48, 4)}, "does not fit"),
        ({"self_attn.q_proj.lora_A": (4, 48)}, "do not belong to the base model"),
    ],
)
def test_low_rank_pairs_that_are_none(
    tensors: dict[str, tuple[int, ...]], message: str, adapted: Callable[..., Path]
) -> None:
    named = {
        f"base_model.model.model.layers.0.{k}.weight": np.ones(s, np.float32) for k, s in tensors.items()
    }
    refused(adapted(named), message)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 10**400},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"alpha_pattern": {"q_proj": [1]}},
        {"init_lora_weights": {"a": 1}},
        {"peft_type": ["LORA"]},
        {"bias": [1]},
        {"trainable_token_indices": {"embed_tokens": [10**30]}},
    ],
    ids=str,
)
def test_adapter_fields_of_other_types(fields: dict[str, Any], adapted: Callable[..., Path]) -> None:
    directory = adapted(**fields)
    if "trainable_token_indices" in fields:
        name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        save_file({name: np.ones((1, 48), np.float32)}, directory / "adapter_model.safetensors")
    refused(directory, "adapter")
