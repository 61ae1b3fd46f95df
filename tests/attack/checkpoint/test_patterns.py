"""Patterns of an adapter: those that take for ever are refused, those that people write match as in peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.hostile import bounded, refused

from mars_export.exporter.checkpoint.patterns import Patterns

EVIL = (
    "(([a-z0-9._]+)+)+#",
    "(a|a)*b",
    "(.*)(.*)(.*)(.*)(.*)x",
    ".*.*.*.*.*.*x",
    "(?i)q_proj",
    "(?=a)",
    r"(q)\1",
    "q{1,9999}",
    "((q))",
    "(l|l)(a|a)(y|y)(e|e)(r|r)(s|s)(l|l)(a|a)(y|y)(e|e)",
    "(" * 50_000,
    "x" * 100_000,
    "[z-a]",
    "",
)


@pytest.mark.parametrize("pattern", EVIL, ids=range(len(EVIL)))
def test_patterns_that_take_for_ever(pattern: str, adapted: Callable[..., Path]) -> None:
    refused(adapted(alpha_pattern={pattern: 8}), "pattern.*merge_and_unload")
    refused(adapted(trainable_token_indices={pattern: [1]}), "pattern.*merge_and_unload")


def test_more_expressions_than_anyone_writes(adapted: Callable[..., Path]) -> None:
    refused(
        adapted(alpha_pattern={f"a{i}.*": 1 for i in range(1000)}),
        "1000 regular expressions are more than 16",
    )


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj"),
        ("layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        (r".*layers\.(0|1|17)\..*q_proj", "model.layers.17.self_attn.q_proj"),
        (r"^model\.layers\.\d+\.mlp.up_proj$", "model.layers.5.mlp.up_proj"),
        ("[qkv]_proj", "model.layers.0.self_attn.k_proj"),
    ],
)
def test_patterns_that_people_write(pattern: str, module: str) -> None:
    import re

    assert re.match(rf"(.*\.)?({pattern})$", module), "as peft matches them"
    assert Patterns({pattern: 7}).find(module, 1) == 7
    assert Patterns({pattern: 7}).find("model.layers.0.mlp.gate_proj", 1) == 1


def test_the_worst_pattern_that_is_let_through_is_quick() -> None:
    worst = Patterns({"(" + "|".join("a" * 16) + ").*.*z": 1})
    with bounded():
        for i in range(100):
            assert worst.find(f"model.layers.{i}." + "a" * 60, 0) == 0
