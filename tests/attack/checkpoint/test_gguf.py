"""GGUF files whose fields have other types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.gguf_files import LLAMA, write_gguf
from support.hostile import bounded

from mars_export.exporter.checkpoint.gguf import convert
from mars_export.runtime.errors import CheckpointError


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
        put("llama.attention.key_length", 14, T.UINT32),
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
    write_gguf(LLAMA, tmp_path / "model.gguf", change)
    with bounded(), pytest.raises(CheckpointError, match=r"model.gguf: "):
        convert(tmp_path / "model.gguf", tmp_path / "model")
