"""config.json made to hurt: numbers that no model has, and values that break arithmetic or messages."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny
from support.hostile import bounded, refused
from support.tiny import Named

from mars_export.exporter.checkpoint.open import open_checkpoint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2_000_000_000),
        ("num_hidden_layers", 20_000_000),
        ("num_hidden_layers", 4097),
        ("head_dim", 10**10),
        ("vocab_size", 10**12),
        ("hidden_size", 10**4000),
        ("intermediate_size", 2**40),
        ("num_attention_heads", 2**31),
        ("max_position_embeddings", 2**40),
    ],
)
def test_numbers_that_no_model_has(field: str, value: int, copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, **{field: value})
    refused(directory, f"`{field}` is .*, beyond the")


def test_labels_are_not_made(copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, num_labels=10**9)
    with bounded():
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 10**400},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 10**400}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}},
        {"rope_parameters": {"rope_type": "x" * 10_000_000}},
        {"rope_parameters": {"sliding": {"rope_type": "default"}}},
        {"model_type": "x" * 10_000_000},
        {"hidden_act": ["silu"] * 200_000},
        {"quantization_config": {"quant_method": "x" * 10_000_000}},
    ],
    ids=range(9),
)  # fmt: skip
def test_config_values_that_break_arithmetic_or_messages(changes: dict[str, Any], copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, **changes)
    refused(directory, "config.json")
