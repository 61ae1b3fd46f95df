"""Text that breaks tokenizers, and tokenizers of the kinds that the C++ runtime reads, trained on it in a
second.
"""

from __future__ import annotations

import itertools
import json
import random

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from support.paths import ROOT

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

SAMPLES = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    "Hello, World! It's they're I'VE we'Ll you'D 'S 'ſ o'clock rock'n'roll '' 'x 's's",
    "naïve café cafe\u0301 e\u0301\u0323 e\u0323\u0301 \u1e9b\u0323 \u212b Å A\u030a ﬁ ﬃ ² ①  ½ ൰ Ⅷ",
    "한국어 \u1112\u1161\u11ab 각 \u1100\u1161\u11a8 가\u11a8 \u1100\u11a8 ᄀ 힣",
    "日本語のテキスト、漢字仮名交じり。中文，混合 text 123 カ\u3099 ガ",
    "العربية ١٢٣ עברית हिन्दी क्षत्रिय ไทย ภาษาไทย தமிழ் ნ ქართული ⵣ",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇫🇷 ❤️‍🔥 1️⃣ \U0001fae8 a\u200db \u200b\ufeff",
    "Z̸̡̢̛̗͉a̴͇͊l̷̰̈́g̵̱̈o̶̦̍ \u0301\u0300 x\u0334\u0345\u0301",
    "0 1 12 123 1234 12345 1,234.56 -7e-10 0x1F 1_000 ٣٤٥٦ 𝟘𝟙𝟚 ⅯⅭ ²³",
    "a  b   c    d\te\t\tf \t g\u00a0h\u2003\u2003i\u3000j\x85k\x0b\x0cl\u2028m\u2029n ",
    "line\nline\r\nline\rline\n\nline \n line\n  \n  indented\r\n\r\n\t\ttabbed   \n",
    "   leading and trailing   ",
    "\r\n\n\r  \r\n x",
    "def f(x):\n    if x != 0:\n        return x**2  # why\n\treturn {'a': [1, 2], \"b\": None}\n\n\n",
    '<div class="a">&nbsp;</div> // ... --> ==> !!! ??? ;;; $$$ %% ^^ ~~ `` \\ | @@ ##',
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|><|im_end|><|endoftext|><|im_start",
    "x<|im_end|>y <|im_end|> <|im_end|>\n<|im_end|><|im_end|>3 'S<|im_end|>'s",
    "<think>\n\n</think> <THINK> <thi\u0301nk> cafe\u0301! café!",
    "Ġ Ċ Ã© ĠĠhello Ā",
    "\x00\x01\x1f\x7f\x80\x9f\xad \u0378 \U000e0001 \U0010ffff \ufffd \ufffe \ue000",
    "ﷺ ﷽ 𒐫 ꧅ 𓀀 𝕳𝖊𝖑𝖑𝖔 🅰 ⓐ ǅ ǆ ß ẞ ı İ ſ K",
    "\U000105c0\U000105e4 \U00010d40 \U00011de0 \U00016ff4 \U000323b0 new letters and numbers",
    "a\u0898b\u07fdc x\u0898\u0301 \U00011938 \U00011935\U00011930",
    "x" * 3000,
    " " * 3000 + "y",
    "\n" * 500 + "z" + "\r" * 300,
    "ab" * 2000,
    "7" * 1001,
    "!?" * 900,
    "日本" * 700,
    "\u0301" * 400,
    "e" + "\u0323\u0301" * 300,
    " \n" * 300,
    "'s" * 200,
]
PIECES = [*"aZé ſ'sStTlLdD\n\r\t 07٣²Ⅷ.!日한\u0301\u0323\u1100\u1161\u11a8🙂\u200d\u00a0\u3000\x85<|>_-"]
PIECES += ["'re", "'VE", "<|im_end|>", "<think>", "\r\n", "  ", "\u212b", "\U00011de0", "café", "Ġ", "\x00"]


def mixtures(count: int, seed: int = 0) -> list[str]:
    """Random strings of pieces that matter, seeded."""
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(1, 24))) for _ in range(count)]


def short_ones() -> list[str]:
    """Every string of up to three characters that the split patterns tell apart."""
    alphabet = "aS1'.\n\r ſ日"
    return ["".join(letters) for n in (1, 2, 3) for letters in itertools.product(alphabet, repeat=n)]


def _train(tokenizer: Tokenizer, vocab_size: int) -> None:
    lines = [
        *SAMPLES,
        *mixtures(300, 7),
        (ROOT / "README.md").read_text(encoding="utf-8"),
        (ROOT / "docs/format.md").read_text(encoding="utf-8"),
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)


def _split(pattern: str) -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def smollm() -> Tokenizer:
    """GPT-2's split behind single digits, no normaliser."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, 900)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im"])
    return tokenizer


def qwen2() -> Tokenizer:
    """NFC, the Qwen2 split with its look-ahead, special and plain added tokens, one normalised."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(QWEN2)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _train(tokenizer, 1100)
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
        ]
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("cafe\u0301!", normalized=True), AddedToken("a b", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("cafe\u0301?", normalized=True)])
    return tokenizer


def llama3() -> Tokenizer:
    """Up to three digits a piece, whole words before merges, a token in front of every prompt."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _split(LLAMA3)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, 1000)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]} $B:1", special_tokens=[begin]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    # Training only yields words that merges reach; this one must be found whole.
    whole = json.loads(tokenizer.to_str())
    whole["model"]["vocab"]["Ġzqx"] = len(whole["model"]["vocab"])
    for token in whole["added_tokens"]:
        token["id"] += 1
    for part in whole["post_processor"]["processors"][1]["special_tokens"].values():
        part["ids"] = [i + 1 for i in part["ids"]]
    return Tokenizer.from_str(json.dumps(whole))


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _falling_back(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Train a SentencePiece-like tokenizer, and give it bytes to fall back to: training itself knows none."""
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    lines = [*SAMPLES[:12], *mixtures(200, 7), (ROOT / "README.md").read_text(encoding="utf-8")]
    letters = ["▁", *(c for c in sorted(set("".join(lines))) if c.isascii() and c not in "\n\t\r ")]
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, limit_alphabet=100, initial_alphabet=letters
    )
    trainer.show_progress = False
    tokenizer.train_from_iterator(lines, trainer)
    whole = json.loads(tokenizer.to_str())
    whole["added_tokens"] = whole["added_tokens"][:3]
    begin = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    whole["post_processor"] = {
        "type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": begin,
    }  # fmt: skip
    return Tokenizer.from_str(json.dumps(whole))


def llama2() -> Tokenizer:
    """Characters that fall back to bytes; the normaliser marks spaces, also behind every added token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made = _falling_back(tokenizer, 700)
    made.add_special_tokens(
        [AddedToken("<|im_end|>", normalized=False), AddedToken("<|mask|>", normalized=False)]
    )
    made.add_tokens(
        [
            AddedToken("<think>", normalized=False),
            AddedToken("the i", normalized=True),
            AddedToken("<0x41>x", normalized=False),
        ]
    )
    return made


def mistral() -> Tokenizer:
    """The same with a pre-tokenizer that marks spaces, and the text's start only."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    made = _falling_back(tokenizer, 800)
    made.add_special_tokens(
        [AddedToken("<|im_end|>", normalized=False), AddedToken("<|mask|>", normalized=False)]
    )
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("a b", normalized=True)])
    return made


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are one byte of any text."""
    found = [tokenizer.token_to_id(token) for token in BYTES]
    ids = (
        found
        if None not in found
        else [tokenizer.token_to_id(c) for c in pre_tokenizers.ByteLevel.alphabet()]
    )
    return [i for i in ids if i is not None]


KINDS = {"smollm": smollm, "qwen2": qwen2, "llama3": llama3, "llama2": llama2, "mistral": mistral}
