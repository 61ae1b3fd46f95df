"""A tokenizer to try grammars with: bytes, and a few hundred words. Made by code, the same everywhere."""

from __future__ import annotations

from itertools import product

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mars_export.runtime.structured.grammar import Grammars

LETTERS = "etaoinshrdlu"


def small_grammars() -> Grammars:
    """Grammars over a vocabulary of bytes, pairs of common letters and pieces of JSON."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [
        *product(LETTERS, LETTERS),
        ('"', ":"),
        ('"', ","),
        ('"', "}"),
        ("}", "}"),
        ("{", '"'),
        ("]", "}"),
    ]
    tokens = dict.fromkeys([*symbols, *("".join(pair) for pair in pairs)])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(a, b) for a, b in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    size = tokenizer.get_vocab_size()
    return Grammars(tokenizer.to_str(), size, (size - 1,), "list")
