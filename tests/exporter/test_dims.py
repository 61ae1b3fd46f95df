"""config.json: unknown, senseless or left out, each means exactly one thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from mars_export.exporter.checkpoint.dims import dims_from_config
from mars_export.exporter.checkpoint.families import FAMILIES
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError


def refused(directory: Path, message: str, **changes: Any) -> None:
    tiny.change_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(directory))


def test_an_unknown_architecture_names_the_known_ones(copied: Callable[[str], Path]) -> None:
    known = ", ".join([*FAMILIES, "a2d-qwen2", "a2d-qwen3", "a2d-qwen3-it", "sdar"])
    message = rf"architecture `gemma3` is not supported \(known: {known}\)"
    refused(copied("llama"), message, model_type="gemma3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer, not 0"),
        ({"num_hidden_layers": None}, "`num_hidden_layers` must be a positive integer"),
        ({"vocab_size": "288"}, "`vocab_size` must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 heads over 3 key/value heads"),
        ({"head_dim": 13}, "of size 13 do not fit"),
        ({"hidden_act": "gelu"}, "hidden_act `gelu` is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "needs the parameter 'short_factor'"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope type `ntk` is not supported"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` 0.5 of heads of 12 is not supported"),
        ({"head_dim": "many"}, "config.json"),
        ({"num_key_value_heads": [2]}, "config.json"),
        ({"num_key_value_heads": -2}, "config.json"),
        ({"head_dim": -12}, "config.json"),
        ({"rms_norm_eps": "small"}, "config.json"),
        ({"rope_parameters": "default"}, "config.json"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "config.json"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "config.json"),
        ({"rope_parameters": {"rope_theta": -5.0}}, "config.json"),
    ],
)
def test_a_senseless_config(changes: dict[str, Any], message: str, copied: Callable[[str], Path]) -> None:
    refused(copied("llama"), message, **changes)


def test_layer_types_that_do_not_fit(copied: Callable[[str], Path]) -> None:
    message = "`layer_types` must name full_attention or sliding_attention for each of 3 layers"
    refused(
        copied("qwen3-mixed"), message, layer_types=["full_attention", "chunked_attention", "full_attention"]
    )


OPTIONAL = (
    "sliding_window",
    "max_window_layers",
    "use_sliding_window",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
)


@pytest.mark.parametrize("removed", OPTIONAL)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mha", "qwen3-mixed"])
def test_a_field_left_out_means_what_it_means_to_transformers(name: str, removed: str) -> None:
    config_class, _ = tiny.CLASSES[tiny.TINIES[name].family]
    values = config_class(**tiny.config_values(tiny.TINIES[name])).to_dict()
    values.pop(removed, None)
    values.pop("layer_types", None)
    values |= {
        "hidden_size": 256,
        "num_attention_heads": 32,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "max_position_embeddings": 8192,
    }
    theirs = config_class(**values)
    ours = dims_from_config(values)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    if removed == "rope_parameters":
        assert ours.ropes[0].inv_freq[1] == pytest.approx(theirs.rope_parameters["rope_theta"] ** (-2 / 8))
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 3
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
