"""The C++ tokenizer against Hugging Face `tokenizers`: ids of texts, texts of ids, every code point."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nasty
from support.text_driver import KINDS, Driver, differences, tokenizer_of
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

NEWER = (
    "the installed tokenizers follows another Unicode version: "
    "run runtime/cpp/tools/unicode_tables.py and build again"
)


@pytest.mark.parametrize("kind", KINDS)
def test_nasty_texts_get_the_same_ids(kind: str, drivers: Callable[[str], Driver]) -> None:
    texts = [*nasty.SAMPLES, *nasty.short_ones(), *nasty.mixtures(2000, seed=1)]
    assert differences(drivers(kind), tokenizer_of(kind), texts) == []


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_gets_the_same_ids(kind: str, drivers: Callable[[str], Driver]) -> None:
    piece = st.sampled_from(nasty.PIECES) | st.text(max_size=4)

    @settings(max_examples=400, deadline=None)
    @given(st.lists(piece, max_size=20).map("".join))
    def check(text: str) -> None:
        assert drivers(kind).ask("encode", text=text) == tokenizer_of(kind).encode(text).ids

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_text_where_a_span_is_plain(kind: str, drivers: Callable[[str], Driver]) -> None:
    driver, whole = drivers(kind), json.loads(tokenizer_of(kind).to_str())
    special = {token["content"] for token in whole["added_tokens"] if token["special"]}
    model = whole["model"]  # whose merges may spell a special token
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in special]
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.encode_special_tokens = True
    for text in [*nasty.SAMPLES, *nasty.mixtures(500, seed=2)]:
        span = [[0, len(text.encode())]]
        wanted = tokenizer.encode(text, add_special_tokens=False).ids
        assert driver.ask("encode", text=text, special=False, plain=span) == wanted, text


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_span_changes_nothing_around_it(kind: str, drivers: Callable[[str], Driver]) -> None:
    driver, marker = drivers(kind), "<|im_end|>"
    end = tokenizer_of(kind).token_to_id(marker)
    for text in ["hi", " two  words ", "e\u0301", "1234", "\u65e5\u672c\n\n"]:
        turns, first = f"{marker}user\n{text}{marker}\n{text}{marker}", len(f"{marker}user\n")
        second = first + len(f"{text}{marker}\n".encode())
        spans = [[at, at + len(text.encode())] for at in (first, second)]
        ids = driver.ask("encode", text=turns, special=False)
        assert driver.ask("encode", text=turns, special=False, plain=spans) == ids
        attacked = turns.replace(text, text + marker + text)
        spans = [
            [at, at + len((text + marker + text).encode())]
            for at in (first, second + len((marker + text).encode()))
        ]
        assert driver.ask("encode", text=attacked, special=False).count(end) == 5
        assert driver.ask("encode", text=attacked, special=False, plain=spans).count(end) == 3


def test_every_code_point_is_what_the_library_takes_it_for(drivers: Callable[[str], Driver]) -> None:
    """Letters, numbers, spaces of the split patterns; digits of the Digits pre-tokenizer; all 1,112,064."""
    bits = drivers("smollm").ask("classes")
    text = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    for bit, pattern in ((1, r"\p{L}+"), (2, r"\p{N}+"), (4, r"\s+")):
        left = "".join(
            piece for piece, _ in pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text)
        )
        assert left == "".join(c for c in text if not int(bits[ord(c)], 16) & bit), f"{pattern}: {NEWER}"
    pieces = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(text)
    digits = "".join(piece for piece, _ in pieces[1::2])
    assert digits == "".join(c for c in text if int(bits[ord(c)], 16) & 8), f"digits: {NEWER}"


def test_normalisation_of_every_code_point(drivers: Callable[[str], Driver]) -> None:
    """Each on its own, and each that decomposes or combines in many orders."""
    driver, nfc = drivers("qwen2"), normalizers.NFC()
    alone = "\0".join(chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000)
    for start in range(0, len(alone), 100_000):
        part = alone[start : start + 100_000]
        assert driver.ask("nfc", text=part) == nfc.normalize_str(part), NEWER
    special = [
        chr(c)
        for c in range(0x300, 0x110000)
        if unicodedata.combining(chr(c)) or unicodedata.decomposition(chr(c))
    ]
    draw = random.Random(3)
    for _ in range(20):
        text = "".join(draw.choices([*special, *"aAeoOKs\u1100\u1161\u11a8\uac00\u0301\u0323\u0345"], k=5000))
        assert driver.ask("nfc", text=text) == nfc.normalize_str(text)


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_decode_to_the_same_text(kind: str, drivers: Callable[[str], Driver]) -> None:
    """Halves of characters, overlong forms, surrogates, specials, ids beyond the vocabulary."""
    tokenizer = tokenizer_of(kind)
    draw = random.Random(5)
    single = nasty.byte_ids(tokenizer)
    specials = list(tokenizer.get_added_tokens_decoder())
    for _ in range(1500):
        ids = [
            draw.choice(draw.choice([single, specials, range(tokenizer.get_vocab_size() + 40)]))
            for _ in range(draw.randint(0, 12))
        ]
        for skip in (True, False):
            assert drivers(kind).ask("decode", ids=ids, skip=skip) == tokenizer.decode(
                ids, skip_special_tokens=skip
            )
    assert drivers(kind).ask("decode", ids=[-1, 2**40, *single[:1]]) == tokenizer.decode(single[:1])


def test_a_long_word_takes_no_quadratic_time(drivers: Callable[[str], Driver]) -> None:
    """A quarter of a million bytes that no pattern cuts; merged pair by pair they would take hours."""
    for kind, word in zip(
        KINDS, ("a b" * 80_000, "ab" * 125_000, "é 日" * 30_000, "日本" * 40_000, "!" * 250_000), strict=True
    ):
        assert drivers(kind).ask("encode", text=word) == tokenizer_of(kind).encode(word).ids
