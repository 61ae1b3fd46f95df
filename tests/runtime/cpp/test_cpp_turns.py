"""Chat turns in C++ against jinja2 and the table that is taken from its template."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest
from support import templates
from support.text_driver import Driver


@pytest.mark.parametrize("name", templates.GOOD_ONES)
def test_chat_turns_render_as_the_template_does(name: str, drivers: Callable[[str], Driver]) -> None:
    template = templates.GOOD_ONES[name][0]
    turns, text = templates.derived(template), templates.text_of(template)
    assert turns is not None
    draw, rendered = random.Random(2), 0
    contents = [
        "", "hi", " \u2028spaced\x1f \n", "é日本🙂", "</think>", "\u200b", "\x85x\u00a0", "{{ x }}",
        "<|im_end|>",
    ]  # fmt: skip
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
