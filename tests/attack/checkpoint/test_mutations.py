"""Checkpoints and adapters changed at random: they open, or there is a CheckpointError."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hostile import ATTACKS, SCALARS, bounded
from support.tiny import Named

from mars_export.exporter.checkpoint.names import EMBEDDING
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError


def mutated(value: Any, draw: random.Random) -> Any:
    """JSON with one to three places changed."""
    for _ in range(draw.randint(1, 3)):
        at, place, path = value, None, None
        while isinstance(at, dict | list) and at and (place is None or draw.random() < 0.7):
            place, path = at, draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = at[path]
        if place is not None:
            place[path] = copy.deepcopy(draw.choice(SCALARS))
    return value


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
def test_json_of_a_checkpoint_at_random(name: str, copied: Named) -> None:
    directory, draw = copied("qwen3-mixed"), random.Random(name)
    source = directory / name
    original = source.read_text() if source.is_file() else '{"eos_token_id": [266]}'
    for _ in range(ATTACKS):
        source.write_text(json.dumps(mutated(json.loads(original), draw)), encoding="utf-8")
        with bounded():
            attempt(directory)


def test_weights_of_a_checkpoint_at_random(copied: Named) -> None:
    directory, draw = copied("llama"), random.Random(1)
    source = directory / "model.safetensors"
    original = source.read_bytes()
    length = int.from_bytes(original[:8], "little")
    for _ in range(ATTACKS):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(8 + length)] = draw.randrange(256)
        source.write_bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])
        with bounded():
            attempt(directory)


def test_adapters_at_random(adapted: Callable[..., Path]) -> None:
    directory = adapted(alpha_pattern={"q_proj": 3}, trainable_token_indices=[1], modules_to_save=["norm"])
    source, draw = directory / "adapter_config.json", random.Random(3)
    original = source.read_text()
    for _ in range(ATTACKS):
        source.write_text(json.dumps(mutated(json.loads(original), draw)), encoding="utf-8")
        with bounded():
            attempt(directory)


def test_tensors_of_an_adapter_at_random(adapted: Callable[..., Path]) -> None:
    part = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{part}.lora_A.weight": np.ones((4, 48)), f"{part}.lora_B.weight": np.ones((48, 4))}
    tensors |= {f"base_model.model.{name}": np.ones((288, 48)) for name in ("lm_head.weight", EMBEDDING)}
    directory, draw = adapted(tensors, modules_to_save=["lm_head"]), random.Random(5)
    source = directory / "adapter_model.safetensors"
    original = source.read_bytes()
    length = int.from_bytes(original[:8], "little")
    entries = json.loads(original[8 : 8 + length])
    for _ in range(ATTACKS):
        text = json.dumps(mutated(copy.deepcopy(entries), draw)).encode("utf-8")
        source.write_bytes(len(text).to_bytes(8, "little") + text + original[8 + length :])
        with bounded():
            attempt(directory)


def attempt(directory: Path) -> None:
    problem = None
    try:
        open_checkpoint(str(directory))
    except CheckpointError as error:
        problem = error
    assert len(str(problem)) < 50_000
