"""GGUF files made to hurt: headers that never end, fields of other types, and any bytes at random."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support import tiny
from support.hostile import ATTACKS, bounded

from mars_export.exporter.checkpoint.gguf import convert
from mars_export.runtime.errors import CheckpointError


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def gguf_file(
    path: Path, *fields: bytes, tensors: bytes = b"", num_tensors: int = 0, num_fields: int = -1
) -> Path:
    count = len(fields) if num_fields < 0 else num_fields
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(fields) + tensors)
    return path


HUGE = 2**63
GGUFS: dict[str, tuple[tuple[bytes, ...], dict[str, Any]]] = {
    "array of arrays": ((field("a", 9, struct.pack("<IQ", 9, HUGE)),), {}),
    "deep arrays": ((field("a", 9, struct.pack("<IQ", 9, 1) * 100_000),), {}),
    "long array": ((field("a", 9, struct.pack("<IQ", 0, HUGE)),), {}),
    "long array of texts": ((field("a", 9, struct.pack("<IQ", 8, HUGE)),), {}),
    "long text": ((field("a", 8, struct.pack("<Q", HUGE)),), {}),
    "unknown type": ((field("a", 77, b"1234"),), {}),
    "many fields": ((), {"num_fields": HUGE}),
    "many tensors": ((), {"num_tensors": HUGE}),
    "tensor of rank 2**31": ((), {"num_tensors": 1, "tensors": struct.pack("<QcI", 1, b"a", 2**31)}),
    "tensor of 2**120 numbers": (
        (), {"num_tensors": 1, "tensors": struct.pack("<QcIQQIQ", 1, b"a", 2, 2**60, 2**60, 0, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUFS)
def test_gguf_headers_that_never_end(case: str, tmp_path: Path) -> None:
    fields, settings = GGUFS[case]
    path = gguf_file(tmp_path / "model.gguf", *fields, **settings)
    with bounded(), pytest.raises(CheckpointError, match="not a readable GGUF file"):
        convert(path, tmp_path / "model")


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


def test_gguf_files_at_random(tmp_path: Path) -> None:
    source, draw = written(tmp_path / "model.gguf", lambda writer: None), random.Random(2)
    original = source.read_bytes()
    for _ in range(ATTACKS):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.choice((0, 8, 9, 255, draw.randrange(256)))
        source.write_bytes(data)
        with bounded(), suppress(CheckpointError):
            convert(source, tmp_path / "model")
