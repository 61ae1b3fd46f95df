"""Text streams in C++ against those of runtime/text/tokenizer.py, piece by piece."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support import nasty, tiny
from support.text_driver import KINDS, Driver, tokenizer_of

from mars_export.runtime.text.stream import TextStream

STOPS = ["STOP", "the i", "\n\n", "本", "🙂", "aa", "ST ", "n", "er", "\ufffd", "é\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_show_the_same_pieces(kind: str, drivers: Callable[[str], Driver]) -> None:
    """Random tokens against runtime/text/tokenizer.py: pieces, final text, tokens before a stop."""
    tokenizer = tokenizer_of(kind)
    text, draw = tiny.text(tokenizer, None), random.Random(11)
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
        if draw.random() < 0.1:  # bytes that never are characters, in between
            at = draw.randint(0, len(ids))
            ids[at:at] = draw.choices(draw.choice([single, single[0x80:0x82]]), k=draw.randint(40, 200))
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
