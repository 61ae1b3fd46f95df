"""A GGUF file becomes a Hugging Face directory: same logits, same tokenizer, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support import tiny
from support.gguf_files import LLAMA, write_gguf
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from mars_export.exporter.checkpoint.gguf import convert
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError

TIED = tiny.Tiny("gguf-tied", "llama", tied=True)
QWEN3 = tiny.Tiny("gguf-qwen3", "qwen3", {"head_dim": 12}, tied=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where converted files are kept."""
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("spec", [LLAMA, TIED, QWEN3], ids=lambda spec: spec.name)
def test_logits_are_those_of_the_original(spec: tiny.Tiny, tmp_path: Path) -> None:
    original = write_gguf(spec, tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "model")
    converted = tiny.load(spec, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is spec.tied
    ids = torch.tensor([list(range(3, 40))])
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, atol=1e-4, rtol=0)


def test_a_gguf_file_is_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    original = write_gguf(LLAMA, tmp_path / "model.gguf")
    for _ in range(2):  # the second time from the cache
        checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert list(cache.iterdir()) == list(cache.glob("gguf-*-v4"))
    assert checkpoint.vocabulary.mask_token_id == tiny.MASK
    assert checkpoint.vocabulary.eos_token_ids == (tiny.IM_END, tiny.ENDOFTEXT)
    assert checkpoint.vocabulary.chat_template == tiny.CHAT_TEMPLATE
    for name, tensor in original.state_dict().items():
        np.testing.assert_array_equal(checkpoint.tensors.read(name), tensor.numpy())


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    write_gguf(LLAMA, tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "model")
    rebuilt, original = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")), tiny.tokenizer()
    for text in (
        "the inner man",
        "<|im_start|>user\nI have 12 apples<|im_end|>",
        "né 日本 🙂",
        "  two  spaces\n\n",
    ):
        assert rebuilt.encode(text).ids == original.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text).ids) == original.decode(original.encode(text).ids)


UNREADABLE: list[tuple[Callable[[gguf.GGUFWriter], None], str]] = [
    (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(6, np.float32)),
        "scaled rope in a GGUF file is not supported",
    ),
    (
        lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones((2, 2), np.float32)),
        "unknown GGUF tensors: blk.0.ffn_gate_exps.weight",
    ),
    (  # the package's NotImplementedError is nothing for a user
        lambda writer: writer.add_tensor("blk.7.attn_norm.weight", np.ones(32, np.float64)),
        r"GGUF tensor `blk.7.attn_norm.weight` is not readable \(.*F64.*\); export the original",
    ),
]


@pytest.mark.parametrize(("add", "message"), UNREADABLE, ids=["scaled rope", "unknown place", "float64"])
def test_tensors_that_are_not_read(
    add: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(LLAMA, tmp_path / "model.gguf", add)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert not list(cache.glob("*"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama", b"gemma", r"GGUF architecture `gemma` is not supported \(known: llama, qwen2, qwen3\)"),
        (b"<|mask|>", b"<|tusk|>", r"model.gguf: the tokenizer has no mask token"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_other_words_in_the_header(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    write_gguf(LLAMA, tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes().replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.5, 0.99])
def test_a_damaged_file_is_refused_and_leaves_nothing(share: float, tmp_path: Path, cache: Path) -> None:
    write_gguf(LLAMA, tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"model.gguf: not a readable GGUF file"):
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert not list(cache.glob("*"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: w.add_rope_dimension_count(6), "rope.dimension_count 6, with heads of 12"),
        (lambda w: w.add_value_length(8), "attention.value_length 8, with heads of 12"),
        (lambda w: w.add_rope_scaling_factor(4.0), "rope.scaling.factor 4.0"),
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), "rope.scale_linear 2.0"),
        (lambda w: w.add_string("llama.rope.scaling.type", "linear"), "rope.scaling.type 'linear'"),
        (lambda w: w.add_sliding_window(64), "attention.sliding_window 64"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale 0.5"),
        (lambda w: w.add_residual_scale(0.2), "residual_scale"),
        (lambda w: w.add_expert_count(8), "expert_count 8"),
        (lambda w: w.add_add_eos_token(True), "tokenizer.ggml.add_eos_token True"),
        (lambda w: w.add_add_space_prefix(True), "tokenizer.ggml.add_space_prefix True"),
        (lambda w: w.add_uint16("split.count", 3), "split.count 3"),
        (lambda w: w.add_add_eos_token(False), None),
        (lambda w: w.add_uint16("split.count", 1), None),
        (lambda w: w.add_bool("llama.attention.causal", True), None),
        (lambda w: w.add_string("llama.rope.scaling.type", "none"), None),
        (lambda w: w.add_rope_scaling_factor(1.0), None),
        (lambda w: w.add_rope_dimension_count(12), None),
        (lambda w: w.add_sliding_window(0), None),
        (lambda w: w.add_logit_scale(1.0), None),
        (lambda w: w.add_vocab_size(288), None),
    ],
)
def test_what_would_change_the_model_is_refused(
    change: Callable[[gguf.GGUFWriter], None], what: str | None, tmp_path: Path
) -> None:
    write_gguf(LLAMA, tmp_path / "model.gguf", change)
    if what is None:  # says that something is off
        convert(tmp_path / "model.gguf", tmp_path / "model")
        return
    with pytest.raises(CheckpointError, match=f"not supported in a GGUF file: {what}"):
        convert(tmp_path / "model.gguf", tmp_path / "model")


@pytest.mark.parametrize(("pre", "flag"), [("smollm", True), ("llama-bpe", False), ("qwen2", None)])
def test_special_tokens_of_the_metadata(pre: str, flag: bool | None, tmp_path: Path) -> None:
    """Ends of the text, of a turn and of a tool message; whether prompts begin with the first token."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(tiny.IM_START)
        writer.add_eom_token_id(7)
        writer.add_pad_token_id(8)
        writer.add_mask_token_id(9)
        if flag is not None:
            writer.add_add_bos_token(flag)

    write_gguf(LLAMA, tmp_path / "model.gguf", change, pre=pre)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    found = open_checkpoint(str(tmp_path / "model")).vocabulary
    ends = (tiny.IM_END, tiny.IM_START, 7, tiny.ENDOFTEXT)
    assert (found.eos_token_ids, found.pad_token_id) == (ends, 8)
    assert (found.mask_token_id, found.bos_token) == (9, "<|endoftext|>")
    ids = Tokenizer.from_str(found.tokenizer_json).encode("a").ids
    assert ids == [*([tiny.ENDOFTEXT] if flag else []), *tiny.tokenizer().encode("a").ids]


def test_answers_end_at_the_end_of_a_turn_that_no_metadata_names(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(tiny.ENDOFTEXT)

    write_gguf(LLAMA, tmp_path / "model.gguf", change)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    found = open_checkpoint(str(tmp_path / "model")).vocabulary
    assert sorted(found.eos_token_ids) == sorted((tiny.ENDOFTEXT, tiny.IM_END))


WORDS = (
    "the inner man's 1234567 apples, can't YOU'LL?",
    "<|im_start|>user\nI have 12 apples<|im_end|>\n",
    "né e\u0301 日本 🙂\r\n\r\n  two  spaces\n\n\t x",
    "a\u00a0b  !!??...\n",
)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_published_pre_tokenizers(pre: str, tmp_path: Path) -> None:
    """With the expressions that transformers has for Qwen2 and for Llama 3."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    write_gguf(LLAMA, tmp_path / "model.gguf", pre=pre)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    rebuilt = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    plain = tiny.tokenizer()
    if pre == "llama-bpe":
        pattern = TikTokenConverter().pattern
        assert "{1,3}" in pattern
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    else:
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        plain.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    for text in WORDS:
        assert rebuilt.encode(text, add_special_tokens=False).ids == plain.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text).ids) == plain.decode(plain.encode(text).ids)
    begins = rebuilt.encode("a").ids[0] == tiny.ENDOFTEXT
    assert begins == (pre == "llama-bpe")


@pytest.mark.usefixtures("cache")
def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    write_gguf(LLAMA, tmp_path / "model.gguf", pre="tekken")
    tiny.write_tokenizer(tmp_path / "words")
    with pytest.raises(
        CheckpointError, match="GGUF tokenizer `gpt2`/`tekken` cannot be rebuilt exactly .*--tokenizer"
    ):
        open_checkpoint(str(tmp_path / "model.gguf"))
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"), tokenizer=str(tmp_path / "words"))
    assert (
        json.loads(checkpoint.vocabulary.tokenizer_json)["model"]
        == json.loads(tiny.tokenizer().to_str())["model"]
    )
    with pytest.raises(CheckpointError, match="not a directory with a tokenizer.json"):
        open_checkpoint(str(tmp_path / "model.gguf"), tokenizer=str(tmp_path))
