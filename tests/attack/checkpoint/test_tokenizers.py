"""Tokenizers made to hurt: special tokens, mask ids and files that are none."""

from __future__ import annotations

import pytest
from support import tiny
from support.hostile import refused
from support.tiny import Named


@pytest.mark.parametrize("name", ["mask_token", "eos_token", "pad_token", "bos_token"])
@pytest.mark.parametrize("value", [5, True, ["x"], {"content": 7}, 1.5], ids=str)
def test_special_tokens_that_are_no_texts(name: str, value: object, copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, "tokenizer_config.json", **{name: value})
    refused(directory, f"tokenizer_config.json: `{name}` must be a string")


@pytest.mark.parametrize("mask", ["99999999999", "9" * 5000, "-1", "١٢", "x" * 10_000_000])
def test_mask_ids_beyond_everything(mask: str, copied: Named) -> None:
    refused(copied("llama"), "mask", mask_token=mask)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"model": {"type": "BPE"}}']
)
def test_tokenizers_that_are_none(content: bytes, copied: Named) -> None:
    directory = copied("llama")
    (directory / "tokenizer.json").write_bytes(content)
    refused(directory, "tokenizer.json")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(content)
    refused(directory, "tokenizer")
