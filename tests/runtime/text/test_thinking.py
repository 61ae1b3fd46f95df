"""Thinking that is split from an answer: what is not thinking is text, however the answer is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mars_export.runtime.bundle.turns import ThinkingMarks
from mars_export.runtime.text.thinking import ThinkingStream

MARKS = ThinkingMarks("<think>", "</think>")
PIECES = ["<think>", "</think>", "<thi", "nk>", "</", "<", ">", " ", "\n\n", "well", "é", "<tool_call>"]


def split(text: str, cuts: Iterable[int], *, is_open: bool) -> tuple[str, str]:
    """The thinking and the text of an answer that comes in pieces."""
    stream = ThinkingStream(MARKS, is_open=is_open)
    pairs = [stream.push(text[start:end]) for start, end in pairwise([0, *sorted(cuts), len(text)])]
    pairs.append(stream.finish())
    assert 0 <= stream.num_thinking <= len(text)
    return "".join(thinking for thinking, _ in pairs), "".join(said for _, said in pairs)


@settings(max_examples=600)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans(), st.data())
def test_text_in_is_text_out_whatever_is_thinking(text: str, is_open: bool, data: st.DataObject) -> None:
    opening = r"\s*" if is_open else r"\s*<think>\s*"
    match = re.fullmatch(rf"{opening}(.*?)(?:\s*</think>\s*(.*))?", text, re.DOTALL)
    if match is None:
        expected = "", text
    elif match[2] is None:  # it is not closed
        expected = match[1], ""
    else:
        expected = match[1], match[2]
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    assert split(text, cuts, is_open=is_open) == expected
    assert split(text, range(1, len(text)), is_open=is_open) == expected


def test_where_the_thinking_ends() -> None:
    stream = ThinkingStream(MARKS)
    assert stream.push("\n<think>\nso ") == ("so", "")
    assert stream.num_thinking == 12
    assert stream.push("it is </think>\n\nYes. </think>") == (" it is", "Yes. </think>")
    assert stream.num_thinking == len("\n<think>\nso it is </think>\n\n")
