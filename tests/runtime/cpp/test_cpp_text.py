"""The C++ text layer against what it stands in for: Hugging Face `tokenizers`, jinja2 and runtime/text.py."""

from __future__ import annotations

import json
import os
import random
import subprocess
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nasty, templates
from support.fields import with_field
from support.missing import lacking
from support.paths import ROOT
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from mars_export.runtime.text import Text, TextStream

KINDS = sorted(nasty.KINDS)
NEWER = (
    "the installed tokenizers follows another Unicode version: "
    "run runtime/cpp/tools/unicode_tables.py and build again"
)


def driver_path() -> Path:
    """The built text_driver, if possible without sanitizers, or the one that MARS_TEXT_DRIVER names."""
    if named := os.environ.get("MARS_TEXT_DRIVER"):
        return Path(named)
    built = [
        ROOT / "build" / "cpp" / preset / "tests" / "text_driver"
        for preset in ("release", "debug", "asan", "tsan")
    ]
    found = next((path for path in built if path.is_file()), None)
    return found or lacking("the C++ runtime is not built: make cpp")


class Driver:
    """A running text_driver that answers one question at a time."""

    def __init__(self, tokenizer_json: Path) -> None:
        self.process = subprocess.Popen(
            [driver_path(), tokenizer_json],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self.greeting = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"text_driver died with {self.process.wait()}"
        return dict(json.loads(line))

    def ask(self, op: str, **values: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **values}) + "\n")
        self.process.stdin.flush()
        line = self._read()
        return line.get("answer", line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return nasty.KINDS[kind]()


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    @cache
    def start(kind: str) -> Driver:
        path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
        tokenizer_of(kind).save(str(path))
        started.append(Driver(path))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


def differences(driver: Driver, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The texts whose ids differ."""
    wanted = [e.ids for e in tokenizer.encode_batch(texts)]
    return [text for text, ids in zip(texts, wanted, strict=True) if driver.ask("encode", text=text) != ids]


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


STOPS = ["STOP", "the i", "\n\n", "本", "🙂", "aa", "ST ", "n", "er", "\ufffd", "é\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_show_the_same_pieces(kind: str, drivers: Callable[[str], Driver]) -> None:
    """Random tokens and broken-up texts against runtime/text.py: pieces, final text, tokens before a stop."""
    tokenizer = tokenizer_of(kind)
    text, draw = Text(tokenizer, None), random.Random(11)
    single = nasty.byte_ids(tokenizer)
    for _ in range(700):
        words = "".join(
            draw.choices(
                ["the ", "inner", "é", "日本", "🙂", "\n", "a", "STOP", "ST", "\ufffd", "n "],
                k=draw.randint(0, 10),
            )
        )
        ids = tokenizer.encode(words, add_special_tokens=False).ids
        for _ in range(draw.randint(0, 3)):
            ids.insert(
                draw.randint(0, len(ids)),
                draw.choice(draw.choice([single, range(tokenizer.get_vocab_size() + 40)])),
            )
        if tokenizer.token_to_id("<0x20>") in ids:
            continue  # a space written as a byte, which no encoder does: it forgets that it showed one
        stop = draw.sample(STOPS, draw.randint(0, 3))
        stream, pieces, taken = TextStream(text, stop), [], 0
        for token in ids:
            taken += 1
            stopped = stream.push(token)
            pieces.append(stream.read())
            if stopped:
                break
        pieces.append(stream.finish())
        assert drivers(kind).ask("stream", ids=ids, stop=stop) == {
            "pieces": pieces,
            "text": stream.text,
            "taken": taken,
        }, (ids, stop)


@pytest.mark.parametrize("name", templates.GOOD_ONES)
def test_chat_turns_render_as_the_template_does(name: str, drivers: Callable[[str], Driver]) -> None:
    template = templates.GOOD_ONES[name][0]
    turns, text = templates.derived(template), templates.text_of(template)
    assert turns is not None
    draw, rendered = random.Random(2), 0
    contents = [
        "",
        "hi",
        " \u2028spaced\x1f \n",
        "é日本🙂",
        "</think>",
        "\u200b",
        "\x85x\u00a0",
        "{{ x }}",
        "<|im_end|>",
    ]
    for _ in range(300):
        roles = draw.choices(
            ["system", "user", "assistant", "tool", "start"], weights=[1, 3, 2, 1, 0.1], k=draw.randint(1, 5)
        )
        messages = [{"role": role, "content": "".join(draw.choices(contents, k=2))} for role in roles]
        ours = drivers("smollm").ask("render", chat=asdict(turns), messages=messages)
        table = turns.render(messages)
        if table is None:
            assert "render the prompt with the jinja2 template yourself" in ours["error"]
        else:
            rendered += 1
            assert ours == table == text.render(messages)
    assert rendered > 20


def test_what_a_chat_template_refuses(drivers: Callable[[str], Driver]) -> None:
    ask = drivers("smollm").ask
    user = [{"role": "user", "content": "hi"}]
    assert "no chat template, or one that needs jinja2" in ask("render", chat=None, messages=user)["error"]
    assert "non-empty list" in ask("render", chat=asdict(templates.TURNS), messages=[])["error"]
    for field, value, _ in templates.WRONG_TABLES:
        wrong = json.loads(json.dumps(asdict(templates.TURNS))) | {field: value}
        assert "problems in the chat template" in ask("render", chat=wrong, messages=user)["error"]


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


REFUSED: list[tuple[str, str, Any, str]] = [
    ("smollm", "version", "2.0", "version: `2.0` is not one of 1.0"),
    ("smollm", "truncation", {"max_length": 3}, "truncation: would change every prompt"),
    ("smollm", "padding", {"strategy": "BatchLongest"}, "padding: would change every prompt"),
    ("smollm", "model.type", "WordPiece", "only BPE is supported, not `WordPiece`"),
    (
        "smollm",
        "model.byte_fallback",
        True,
        "model.byte_fallback: 256 of the tokens <0x00> to <0xFF> are missing",
    ),
    ("smollm", "model.byte_fallback", 1, "model.byte_fallback: not supported: 1"),
    ("llama2", "model.byte_fallback", False, "bytes have no token of their own"),
    (
        "llama2",
        "model.vocab.<0x0A>",
        ...,
        "model.byte_fallback: 1 of the tokens <0x00> to <0xFF> are missing",
    ),
    ("llama2", "normalizer", None, "normalizer: with byte fallback, only Prepend and Replace"),
    ("llama2", "normalizer", {"type": "NFC"}, "normalizer: with byte fallback, only Prepend and Replace"),
    (
        "llama2",
        "normalizer.normalizers.0.prepend",
        " ",
        "normalizer: with byte fallback, only Prepend and Replace",
    ),
    (
        "llama2",
        "pre_tokenizer",
        {"type": "Whitespace"},
        "normalizer: with byte fallback, only Prepend and Replace",
    ),
    ("mistral", "pre_tokenizer.replacement", "_", "a Metaspace pre-tokenizer alone"),
    ("mistral", "pre_tokenizer.prepend_scheme", 1, "a Metaspace pre-tokenizer alone"),
    ("mistral", "decoder", None, "decoder: with byte fallback, only Replace, ByteFallback, Fuse"),
    (
        "mistral",
        "decoder.decoders.3.start",
        2,
        "decoder: with byte fallback, only Replace, ByteFallback, Fuse",
    ),
    ("mistral", "decoder.decoders", 5, "decoder: with byte fallback, only Replace, ByteFallback, Fuse"),
    ("smollm", "model.dropout", 0.1, "model.dropout: not supported: 0.1"),
    ("smollm", "model.continuing_subword_prefix", "##", "model.continuing_subword_prefix: not supported"),
    ("smollm", "model.end_of_word_suffix", "</w>", "model.end_of_word_suffix: not supported"),
    ("smollm", "model.vocab", [], "model.vocab: an object of ids by token is expected"),
    ("smollm", "model.vocab.a", -1, "1 ids are not integers"),
    ("smollm", "model.vocab.a", 2**40, "1 ids are not integers"),
    ("smollm", "model.vocab.a", 1.5, "1 ids are not integers"),
    ("smollm", "model.vocab.a", 7, "1 ids belong to two tokens"),
    ("smollm", "model.merges", {}, "model.merges: a list is expected"),
    (
        "smollm",
        "model.merges.3",
        ["zzz", "a"],
        "1 are not two tokens that make a third, the first of them number 3",
    ),
    ("smollm", "model.merges.3", "a b c", "1 are not two tokens"),
    ("smollm", "model.merges.3", 5, "1 are not two tokens"),
    ("smollm", "normalizer", {"type": "NFKC"}, "only NFC is supported, not `NFKC`"),
    ("smollm", "normalizer", {"type": "Prepend", "prepend": "▁"}, "only NFC is supported, not `Prepend`"),
    ("smollm", "pre_tokenizer", None, "pre_tokenizer"),
    ("smollm", "pre_tokenizer", {"type": "Metaspace"}, "`Metaspace` is not supported"),
    ("smollm", "pre_tokenizer.pretokenizers", [], "must end in its one `ByteLevel`"),
    (
        "smollm",
        "pre_tokenizer.pretokenizers.0.individual_digits",
        False,
        "only supported with individual_digits true",
    ),
    (
        "smollm",
        "pre_tokenizer.pretokenizers.1.add_prefix_space",
        True,
        "only supported with add_prefix_space false",
    ),
    (
        "qwen2",
        "pre_tokenizer.pretokenizers.0.pattern.Regex",
        r"\w+",
        r"`Split` with this pattern is not supported",
    ),
    (
        "qwen2",
        "pre_tokenizer.pretokenizers.0.pattern",
        {"String": " "},
        "`Split` with this pattern is not supported",
    ),
    (
        "qwen2",
        "pre_tokenizer.pretokenizers.0.behavior",
        "Removed",
        "only supported as Isolated and not inverted",
    ),
    ("qwen2", "pre_tokenizer.pretokenizers.0.invert", True, "only supported as Isolated and not inverted"),
    ("qwen2", "decoder", None, "only ByteLevel is supported"),
    ("qwen2", "decoder", {"type": "Fuse"}, "only ByteLevel is supported, not `Fuse`"),
    ("qwen2", "added_tokens.0.lstrip", True, "added_tokens[0].lstrip: not supported for"),
    ("qwen2", "added_tokens.0.rstrip", True, "added_tokens[0].rstrip: not supported for"),
    ("qwen2", "added_tokens.0.single_word", True, "added_tokens[0].single_word: not supported for"),
    ("qwen2", "added_tokens.0.special", 1, "added_tokens[0].special: true or false is expected"),
    ("qwen2", "added_tokens.0.content", "", "added_tokens[0].content: a non-empty string is expected"),
    ("qwen2", "added_tokens.1.id", 5, "has 5 where its place gives it"),
    ("qwen2", "added_tokens.1.content", "<|endoftext|>", "has 1101 where its place gives it 1100"),
    ("qwen2", "added_tokens", {}, "added_tokens: a list is expected"),
    ("llama3", "post_processor", {"type": "BertProcessing"}, "`BertProcessing` is not supported"),
    ("llama3", "post_processor.processors.1.single", [], "the text `A` must be there once"),
    ("llama3", "post_processor.processors.1.special_tokens", {}, "an object is expected"),
    ("llama3", "model", ..., "model: an object is expected"),
]


@pytest.mark.parametrize(("kind", "path", "value", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    kind: str, path: str, value: Any, message: str, tmp_path: Path
) -> None:
    assert message in greeting(tmp_path, edited(kind, path, value))["error"]


def test_hostile_files(tmp_path: Path) -> None:
    whole = tokenizer_of("smollm").to_str().encode()
    deep = b"[" * 300_000 + b"]" * 300_000
    hostile = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        deep,
        b'{"pre_tokenizer":' + deep + b"}",
        b'{"model":' + b'{"a":' * 100_000,
    ]
    hostile += [whole[: len(whole) * n // 7] for n in range(7)]
    nested = b'{"type":"Sequence","processors":[' * 20_000 + b"]}" * 20_000
    hostile += [
        edited("smollm", "post_processor", 0).replace(b'"post_processor": 0', b'"post_processor": ' + nested)
    ]
    hostile += [
        edited("smollm", f"pre_tokenizer.pretokenizers.{i}", 0).replace(b"[0,", b"[" + deep + b",")
        for i in (0,)
    ]
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
    texts = [
        *nasty.SAMPLES,
        *nasty.mixtures(300, seed=4),
        "▁",
        " ▁ ▁▁a",
        "<|im_end|> a<think>▁b <think>  c",
        "a b a b",
    ]
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
