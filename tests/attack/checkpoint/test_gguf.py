"""GGUF files whose fields have other types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support import tiny
from support.hostile import bounded

from mars_export.exporter.checkpoint.formats.gguf import convert
from mars_export.runtime.errors import CheckpointError


def written(path: Path, change: Callable[[gguf.GGUFWriter], None]) -> Path:
    """A small GGUF file whose fields are right but for what `change` adds or replaces."""
    writer = gguf.GGUFWriter(str(path), "llama")
    usual: dict[str, Any] = {
        "embedding_length": 48, "block_count": 1, "feed_forward_length": 80, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    for name, value in usual.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = tiny.tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tiny.SPECIALS else 1 for token in tokens])
    writer.add_token_merges(list(tiny.MERGES))
    writer.add_eos_token_id(tiny.IM_END)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(
    name: str, value: Any, kind: gguf.GGUFValueType, item: Any = None
) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][name] = gguf.GGUFValue(value=value, type=kind, sub_type=item)

    return change


T = gguf.GGUFValueType


@pytest.mark.parametrize(
    "change",
    [
        put("llama.attention.head_count", 0, T.UINT32),
        put("llama.attention.head_count", "four", T.STRING),
        put("llama.attention.head_count", [4, 4], T.ARRAY, T.INT32),
        put("llama.attention.head_count", True, T.BOOL),
        put("llama.embedding_length", 2**40, T.UINT64),
        lambda writer: (
            put("llama.attention.key_length", 14, T.UINT32)(writer),
            writer.add_tensor("blk.0.attn_q.weight", np.ones((48, 48), np.float32)),
        ),
        put("llama.rope.freq_base", "big", T.STRING),
        put("llama.attention.layer_norm_rms_epsilon", "small", T.STRING),
        put("general.architecture", 5, T.UINT32),
        put("tokenizer.ggml.tokens", [1, 2, 3], T.ARRAY, T.INT32),
        put("tokenizer.ggml.tokens", 5, T.UINT32),
        put("tokenizer.ggml.token_type", ["a", "b"], T.ARRAY, T.STRING),
        put("tokenizer.ggml.token_type", [1, 1], T.ARRAY, T.INT32),
        put("tokenizer.ggml.merges", ["no pair"], T.ARRAY, T.STRING),
        put("tokenizer.ggml.merges", 7, T.UINT32),
        put("tokenizer.ggml.eos_token_id", 10**6, T.UINT32),
        put("tokenizer.ggml.model", 7, T.UINT32),
    ],
    ids=range(17),
)
def test_gguf_fields_of_other_types(change: Callable[[gguf.GGUFWriter], None], tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", change)
    with bounded(), pytest.raises(CheckpointError, match=r"model.gguf: "):
        convert(path, tmp_path / "model")
