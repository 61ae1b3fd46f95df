"""config.json: unknown, senseless or left out, each means exactly one thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from mars_export.exporter.checkpoint.architecture.families import FAMILIES
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
    ],
)
def test_a_senseless_config(changes: dict[str, Any], message: str, copied: Callable[[str], Path]) -> None:
    refused(copied("llama"), message, **changes)
