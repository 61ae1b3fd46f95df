"""config.json: its dialects, and what is unknown, senseless or would be ignored by a stock class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny

from mars_export.exporter.checkpoint.families import FAMILIES
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.stock import rope, stock_config
from mars_export.runtime.errors import CheckpointError

SIZES = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1,
    "max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("kind", [{"rope_type": "linear", "factor": 2.5}, YARN], ids=["linear", "yarn"])
def test_dialects_mean_the_same(kind: dict[str, Any]) -> None:
    older = {("type" if name == "rope_type" else name): value for name, value in kind.items()}
    dialects: list[dict[str, Any]] = [
        {"rope_parameters": kind | {"rope_theta": 5e5}},
        {"rope_scaling": kind, "rope_theta": 5e5},
        {"rope_scaling": older, "rope_theta": 5e5, "rope_parameters": None},
    ]
    first, *others = (rope(stock_config(SIZES | fields)) for fields in dialects)
    assert first.inv_freq.dtype == np.float32 and first.inv_freq.shape == (32,)
    assert first.context == (8192 if kind is YARN else 0)
    assert first.scale == (pytest.approx(1.1386, abs=1e-4) if kind is YARN else 1.0)
    for other in others:
        np.testing.assert_array_equal(other.inv_freq, first.inv_freq)
        assert (other.scale, other.context) == (first.scale, first.context)


def test_no_settings_mean_the_default() -> None:
    made = rope(stock_config(SIZES | {"hidden_size": 16}))
    assert made.inv_freq.tolist() == pytest.approx([1.0, 0.01])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "ntk"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "no finite frequencies"),
        ({"rope_parameters": {"rope_theta": -5.0}}, "no finite frequencies"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}}, "parts"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "types of layers"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope(stock_config(SIZES | fields))


def test_long_contexts_are_for_longrope() -> None:
    with pytest.raises(CheckpointError, match="leave out --long-context"):
        stock_config(SIZES, long_context=True)


def refused(directory: Path, message: str, **changes: Any) -> None:
    tiny.change_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(directory))


def test_an_unknown_architecture_names_the_known_ones(copied: Callable[[str], Path]) -> None:
    known = ", ".join([*FAMILIES, "a2d-qwen2", "a2d-qwen3", "a2d-qwen3-it", "sdar", "mimo", "qwen3_5"])
    message = rf"architecture `gemma3` is not supported \(known: {known}\)"
    refused(copied("llama"), message, model_type="gemma3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer, not 0"),
        ({"vocab_size": "288"}, "`vocab_size` must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 heads over 3 key/value heads"),
        ({"head_dim": 13}, "config.json: .* even rotary dimension"),
        ({"hidden_act": "gelu"}, "hidden_act `gelu` is not supported"),
        ({"head_dim": "many"}, "config.json"),
        ({"num_key_value_heads": [2]}, "config.json"),
        ({"num_key_value_heads": -2}, "config.json"),
        ({"head_dim": -12}, "config.json"),
        ({"rms_norm_eps": "small"}, "config.json"),
        ({"rope_parameters": "default"}, "config.json"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "has 'chunked_attention', which is not"),
    ],
)
def test_a_senseless_config(changes: dict[str, Any], message: str, copied: Callable[[str], Path]) -> None:
    refused(copied("llama"), message, **changes)


@pytest.mark.parametrize("name", ["mistral", "qwen2-mha", "qwen3-mixed"])
def test_a_window_of_0_is_none(name: str, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    tiny.change_config(directory, sliding_window=0)
    assert not any(open_checkpoint(str(directory)).dims.windows)
    refused(
        directory,
        "`sliding_window` must be a number of tokens, or null or 0 for no window",
        sliding_window=-1,
    )
