"""Random Qwen3.5 look-alikes made with transformers, and their greedy text one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .graph import Shape, Writer

TINY = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
KINDS = {"l": "linear_attention", "f": "full_attention"}


def look_alike(layers: str, seed: int, sizes: dict[str, Any] | None = None) -> Any:
    """A model of `layers` ("lf": a linear layer, then a full one) with random weights, in fp32."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    kinds = [KINDS[kind] for kind in layers]
    config = Qwen3_5TextConfig(
        **{**TINY, **(sizes or {})}, num_hidden_layers=len(layers), layer_types=kinds, initializer_range=0.2
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("dt_bias", "norm.weight", "layernorm.weight")):
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def shape_of(config: Any) -> Shape:
    return Shape(
        tuple(kind == KINDS["l"] for kind in config.layer_types), config.vocab_size,
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, config.linear_conv_kernel_dim, config.rms_norm_eps,
    )  # fmt: skip


def graph_of(model: Any) -> bytes:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    frequencies = model.model.rotary_emb.inv_freq.numpy()
    angles = np.arange(model.config.max_position_embeddings, dtype=np.float32)[:, None] * frequencies
    return (
        Writer(shape_of(model.config), weights, (np.cos(angles), np.sin(angles))).model().SerializeToString()
    )


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own text, with its cache, one token a forward."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0, use_cache=True,
        )  # fmt: skip
    return [int(token) for token in found[0, len(prompt) :]]
