"""Rotary frequencies against transformers' own initialisers, in both config dialects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mars_export.exporter.checkpoint.architecture.rope import rope_from_config
from mars_export.runtime.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 64},
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"attention_factor": 0.9},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    YARN | {"truncate": False},
    {"rope_type": "dynamic", "factor": 4.0},
]


@pytest.mark.parametrize("head_dim", [12, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(v) for v in kind.values()))
def test_frequencies_and_scale_are_those_of_transformers(
    kind: dict[str, Any], theta: float, head_dim: int
) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters=kind | {"rope_theta": theta},
    )
    expected = LlamaRotaryEmbedding(config)
    version_5 = config.to_dict()
    version_4 = {k: v for k, v in version_5.items() if k != "rope_parameters"} | {
        "rope_theta": theta,
        "rope_scaling": kind,
    }
    older = version_4 | {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in kind.items()}}
    for dialect in (version_5, version_4, older):
        rope = rope_from_config(dialect, head_dim)
        assert rope.inv_freq.dtype == np.float32
        np.testing.assert_array_equal(rope.inv_freq, expected.inv_freq.numpy())
        assert rope.context == (
            YARN["original_max_position_embeddings"] * 4 if "yarn" in kind.values() else 0
        )
        assert rope.scale == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_no_rope_settings_mean_the_default() -> None:
    rope = rope_from_config({}, 4)
    assert rope.inv_freq.tolist() == pytest.approx([1.0, 0.01])
    assert rope.scale == 1.0


@pytest.mark.parametrize("kind", ["ntk", "proportional"])
def test_an_unknown_rope_is_refused_by_name(kind: str) -> None:
    for config in ({"rope_parameters": {"rope_type": kind}}, {"rope_scaling": {"type": kind, "factor": 2.0}}):
        with pytest.raises(
            CheckpointError,
            match=f"rope type `{kind}` is not supported .known: default, dynamic, linear, llama3, yarn",
        ):
            rope_from_config(config, 64)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("linear", "factor"), ("llama3", "original_max_position_embeddings"), ("yarn", "factor")],
)
def test_a_missing_parameter_is_named(kind: str, missing: str) -> None:
    full = {"linear": KINDS[1], "llama3": LLAMA3, "yarn": YARN}[kind]
    config = {
        "max_position_embeddings": 4096,
        "rope_parameters": {k: v for k, v in full.items() if k != missing},
    }
    with pytest.raises(CheckpointError, match=f"rope type `{kind}` needs the parameter '{missing}'"):
        rope_from_config(config, 64)


def test_partial_rotation_is_refused() -> None:
    for config in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        with pytest.raises(CheckpointError, match="partial_rotary_factor"):
            rope_from_config(config, 64)


def test_parameters_by_layer_type_are_refused() -> None:
    nested = {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding")}
    with pytest.raises(CheckpointError, match="separate rope parameters for full_attention, sliding"):
        rope_from_config({"rope_parameters": nested}, 64)
