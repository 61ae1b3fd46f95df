"""How a checkpoint writes JSON is read from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support import tiny
from support.agreement import MAIN
from support.fixtures import Named, Sessions

from mars_export.exporter.check import habit
from mars_export.exporter.checkpoint.open import Checkpoint, open_checkpoint
from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.bundle.manifest import Separators


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Named) -> Checkpoint:
    return open_checkpoint(str(checkpoints(MAIN)))


def said(probes: Sequence[Sequence[int]], behind: dict[str, str]) -> list[np.ndarray]:
    """Logits of a model that writes so behind a comma and behind a colon, whatever the sample does."""
    tokenizer, wide = tiny.tokenizer(), []
    for ids in probes:
        logits = np.zeros((len(ids), tiny.VOCAB_SIZE), np.float32)
        for i, token in enumerate(ids):
            if (text := behind.get(tokenizer.decode([token])[-1:])) is not None:
                logits[i, tokenizer.encode(text).ids[0]] = 9.0
        wide.append(logits)
    return wide


@pytest.mark.parametrize("item", [", ", ","])
@pytest.mark.parametrize("key", [": ", ":"])
def test_what_the_model_likes_behind_a_comma_and_a_colon_is_its_habit(
    item: str, key: str, checkpoint: Checkpoint
) -> None:
    probes = habit.probes(checkpoint)
    logits = said(probes, {",": " " if item == ", " else '"', ":": " " if key == ": " else '"'})
    assert habit.separators(checkpoint, probes, logits) == Separators(item, key)


def test_without_a_sample_there_is_no_habit(checkpoint: Checkpoint) -> None:
    assert habit.separators(checkpoint, [], []) is None


def test_an_export_keeps_the_habit_and_answers_have_it(sessions: Sessions) -> None:
    session = sessions(MAIN)
    info = session.bundle.manifest.text
    assert info is not None and info.separators is not None
    schema = {"const": [{"a": 1}, {"a": 1}]}
    item, key = info.separators.item, info.separators.key
    done = session.generate([5, 17], GenerationConfig(schema=schema))
    assert done.text == f'[{{"a"{key}1}}{item}{{"a"{key}1}}]'
    other = GenerationConfig(schema=schema, separators=(" ,", ":  "))
    assert session.generate([5, 17], other).text == '[{"a":  1} ,{"a":  1}]'


def test_a_bundle_of_before_has_spaces(sessions: Sessions) -> None:
    session = sessions(MAIN)
    manifest = session.bundle.manifest
    assert manifest.text is not None
    old = replace(session.bundle, manifest=replace(manifest, text=replace(manifest.text, separators=None)))
    schema = {"const": [1, {"a": 2}]}
    done = Session(old, session.variant, session.backend).generate([5, 17], GenerationConfig(schema=schema))
    assert done.text == '[1, {"a": 2}]'
