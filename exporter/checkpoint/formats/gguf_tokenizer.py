"""Rebuilds the tokenizer of a GGUF file, for pre-tokenizers with published rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....runtime.errors import CheckpointError
from ..tensors import reading
from .gguf_fields import ORIGINAL, Fields

# Published with the models: how a text is split before its parts become tokens.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen2": WORDS.format(digits=""), "llama-bpe": WORDS.format(digits="{1,3}"), "smollm": None}
# llama.cpp's types of special tokens, and of other tokens that are not split.
CONTROL_TOKEN, USER_TOKEN = 3, 4


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Raises CheckpointError for a tokenizer that cannot be rebuilt exactly.
    """
    kind, pre = fields.need("tokenizer.ggml.model", str), fields.need("tokenizer.ggml.pre", str, "?")
    if kind != "gpt2" or pre not in SPLITS:
        known = ", ".join(f"gpt2/{name}" for name in sorted(SPLITS))
        raise CheckpointError(
            f"{fields.path}: the GGUF tokenizer `{kind[:40]}`/`{pre[:40]}` cannot be rebuilt exactly (known:"
            f" {known}); name a directory with the original tokenizer.json by --tokenizer"
        )
    tokens, types, merges = (
        fields.need(f"tokenizer.ggml.{name}", list) for name in ("tokens", "token_type", "merges")
    )
    ids = {name: fields.token_id(name) for name in ("bos", "eos", "padding", "mask")}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    if "eos" not in named or (adds_bos and "bos" not in named):
        raise CheckpointError(
            f"{fields.path}: no `tokenizer.ggml.eos_token_id`, or no `bos_token_id` to begin with; {ORIGINAL}"
        )
    with reading(f"{fields.path}: its tokenizer"):
        tokenizer = _tokenizer(pre, tokens, types, merges, named["bos"] if adds_bos else None)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": named.pop("padding", named["eos"]),
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": token for name, token in named.items()},
    }
    template = fields.get("tokenizer.chat_template")
    others = fields.get("tokenizer.chat_templates", [])
    if isinstance(template, str):
        forms = [(name, fields.get(f"tokenizer.chat_template.{name}")) for name in others]
        named_forms = [{"name": name, "template": form} for name, form in [("default", template), *forms]]
        config["chat_template"] = named_forms if others else template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tokenizer(pre: str, tokens: list[str], types: list[int], merges: list[str], bos: str | None) -> Any:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    is_llama, split = pre == "llama-bpe", SPLITS[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=is_llama))
    cut = (
        pre_tokenizers.Digits(individual_digits=True)
        if split is None
        else pre_tokenizers.Split(Regex(split), behavior="isolated")
    )
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    whole = [
        (token, kind)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL_TOKEN, USER_TOKEN)
    ]
    tokenizer.add_tokens(
        [AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False) for token, kind in whole]
    )
    return tokenizer
