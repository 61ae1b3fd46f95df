"""What the C++ tokenizer makes of a tokenizer.json: its variants, what it refuses by name, hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import nasty
from support.fields import with_field
from support.text_driver import Driver, differences, tokenizer_of
from tokenizers import Tokenizer


def greeting(tmp_path: Path, data: bytes) -> dict[str, Any]:
    """What the driver says about a tokenizer.json of this content."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    driver = Driver(path)
    driver.close()
    return driver.greeting


def edited(kind: str, path: str, value: Any) -> bytes:
    """A tokenizer.json with one field set, as `with_field` does it."""
    return with_field(tokenizer_of(kind).to_str(), path, value).encode()


SPACES = "normalizer: with byte fallback, only Prepend and Replace"
DECODERS = "decoder: with byte fallback, only Replace, ByteFallback, Fuse"
REFUSED: list[tuple[str, str, Any, str]] = [
    ("smollm", "version", "2.0", "version: `2.0` is not one of 1.0"),
    ("smollm", "model.type", "WordPiece", "only BPE is supported, not `WordPiece`"),
    ("smollm", "model.byte_fallback", True, "256 of the tokens <0x00> to <0xFF> are missing"),
    ("smollm", "model.byte_fallback", 1, "model.byte_fallback: not supported: 1"),
    ("llama2", "model.byte_fallback", False, "bytes have no token of their own"),
    ("llama2", "normalizer", {"type": "NFC"}, SPACES),
    ("llama2", "normalizer.normalizers.0.prepend", " ", SPACES),
    ("llama2", "pre_tokenizer", {"type": "Whitespace"}, SPACES),
    ("mistral", "pre_tokenizer.replacement", "_", "a Metaspace pre-tokenizer alone"),
    ("mistral", "decoder", None, DECODERS),
    ("mistral", "decoder.decoders.3.start", 2, DECODERS),
    ("smollm", "model.dropout", 0.1, "model.dropout: not supported: 0.1"),
    ("smollm", "model.continuing_subword_prefix", "##", "model.continuing_subword_prefix: not supported"),
    ("smollm", "model.end_of_word_suffix", "</w>", "model.end_of_word_suffix: not supported"),
    ("smollm", "model.vocab", [], "model.vocab: an object of ids by token is expected"),
    ("smollm", "model.vocab.a", -1, "1 ids are not integers"),
    ("smollm", "model.vocab.a", 2**40, "1 ids are not integers"),
    ("smollm", "model.vocab.a", 7, "1 ids belong to two tokens"),
    ("smollm", "model.merges", {}, "model.merges: a list is expected"),
    ("smollm", "model.merges.3", ["zzz", "a"],
     "not two tokens that make a third, the first of them number 3"),
    ("smollm", "model.merges.3", "a b c", "1 are not two tokens"),
    ("smollm", "normalizer", {"type": "NFKC"}, "only NFC is supported, not `NFKC`"),
    ("smollm", "pre_tokenizer", {"type": "Metaspace"}, "`Metaspace` is not supported"),
    ("smollm", "pre_tokenizer.pretokenizers", [], "must end in its one `ByteLevel`"),
    ("smollm", "pre_tokenizer.pretokenizers.0.individual_digits", False, "with individual_digits true"),
    ("smollm", "pre_tokenizer.pretokenizers.1.add_prefix_space", True, "with add_prefix_space false"),
    ("qwen2", "pre_tokenizer.pretokenizers.0.pattern.Regex", r"\w+", "`Split` with this pattern is not"),
    ("qwen2", "pre_tokenizer.pretokenizers.0.pattern", {"String": " "}, "`Split` with this pattern is not"),
    ("qwen2", "pre_tokenizer.pretokenizers.0.behavior", "Removed", "only supported as Isolated"),
    ("qwen2", "pre_tokenizer.pretokenizers.0.invert", True, "only supported as Isolated and not inverted"),
    ("qwen2", "decoder", {"type": "Fuse"}, "only ByteLevel is supported, not `Fuse`"),
    ("qwen2", "added_tokens.0.lstrip", True, "added_tokens[0].lstrip: not supported for"),
    ("qwen2", "added_tokens.0.special", 1, "added_tokens[0].special: true or false is expected"),
    ("qwen2", "added_tokens.1.id", 5, "has 5 where its place gives it"),
    ("qwen2", "added_tokens.1.content", "<|endoftext|>", "has 1101 where its place gives it 1100"),
    ("llama3", "post_processor", {"type": "BertProcessing"}, "`BertProcessing` is not supported"),
    ("llama3", "post_processor.processors.1.single", [], "the text `A` must be there once"),
    ("llama3", "post_processor.processors.1.special_tokens", {}, "an object is expected"),
    ("llama3", "model", ..., "model: an object is expected"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    kind: str, path: str, value: Any, message: str, tmp_path: Path
) -> None:
    assert message in greeting(tmp_path, edited(kind, path, value))["error"]


def test_hostile_files(tmp_path: Path) -> None:
    whole = tokenizer_of("smollm").to_str().encode()
    deep = b"[" * 300_000 + b"]" * 300_000
    nested = b'{"type":"Sequence","processors":[' * 20_000 + b"]}" * 20_000
    hostile = [b"", b"{", b"null", b"[]", b"\xff\xfe", deep, b'{"model":' + b'{"a":' * 100_000]
    hostile += [whole[: len(whole) * n // 7] for n in range(7)]
    for path, value in (("post_processor", nested), ("pre_tokenizer.pretokenizers.0", deep)):
        hostile.append(edited("smollm", path, "HERE").replace(b'"HERE"', value))
    for data in hostile:
        assert set(greeting(tmp_path, data)) == {"error"}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("scheme", ["never", "first", "always"])
def test_every_way_to_mark_spaces(scheme: str, split: bool, tmp_path: Path) -> None:
    whole = json.loads(tokenizer_of("mistral").to_str())
    whole["pre_tokenizer"] |= {"prepend_scheme": scheme, "split": split}
    whole["decoder"]["decoders"] = whole["decoder"]["decoders"][: 3 if scheme == "never" else 4]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    driver, tokenizer = Driver(path), Tokenizer.from_file(str(path))
    marks = ["▁", " ▁ ▁▁a", "<|im_end|> a<think>▁b <think>  c", "a b a b"]
    texts = [*nasty.SAMPLES, *nasty.mixtures(300, seed=4), *marks]
    assert differences(driver, tokenizer, texts) == []
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert driver.ask("decode", ids=ids, skip=False) == tokenizer.decode(ids, skip_special_tokens=False)
    driver.close()


def test_both_ways_to_write_merges(tmp_path: Path) -> None:
    whole = json.loads(tokenizer_of("smollm").to_str())
    whole["model"]["merges"] = [" ".join(pair) for pair in whole["model"]["merges"]]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    driver = Driver(path)
    assert differences(driver, tokenizer_of("smollm"), nasty.SAMPLES[:20]) == []
    driver.close()
