"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch

from support import tiny

LLAMA = tiny.Tiny("gguf", "llama", {"head_dim": 12})
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)  # with all that Llama has


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py does it."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    spec: tiny.Tiny, path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None, pre: str = "smollm"
) -> torch.nn.Module:
    model = tiny.build(spec)
    config = model.config
    writer = gguf.GGUFWriter(str(path), spec.family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(
        tiny.config_values(spec).get("head_dim", config.hidden_size // config.num_attention_heads)
    )
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    vocab = tiny.tokenizer().get_vocab()
    by_id = {i: token for token, i in vocab.items()}
    tokens = [by_id.get(i, f"<|unused_{i}|>") for i in range(tiny.VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tiny.SPECIALS else 1 for token in tokens])
    writer.add_token_merges(list(tiny.MERGES))
    writer.add_bos_token_id(tiny.ENDOFTEXT)
    writer.add_eos_token_id(tiny.IM_END)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and spec.tied:
            continue
        values = tensor.numpy()
        if spec.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = permuted(values, heads)
        writer.add_tensor(str(NAMES.get_name(name, (".weight", ".bias"))), np.ascontiguousarray(values))
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
