"""The choice of tau is that of the plain procedure, which decodes every row at every setting and races all
that passed: on scripted models, with a clock without noise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.calibrations import laps_of, task

from mars_export import Completion, GenerationConfig, Stats
from mars_export.calibration.journal import Journal
from mars_export.calibration.rows import Plan
from mars_export.calibration.tau import bounds, race
from mars_export.calibration.tau.calibrate import BATCH, Calibration, Calibrator, calibrate
from mars_export.calibration.tau.options import GRID, CalibrationOptions, setting
from mars_export.runtime.decode.speculation.cost import Cost

BLOCK, NUM_ROWS, PROMPT, SEEDS = 8, 100, 10, 20
COST = Cost(((1, 1.0), (8, 1.4), (15, 1.9), (32, 3.0)))
OPTIONS = CalibrationOptions(max_drop=0.2)


class Model:
    """A session with scripted answers: from each position, the confidence of each mask, and whether its token
    is right. Its clock knows the cost of the steps."""

    device, text, cost = "cpu", None, COST
    variant = SimpleNamespace(is_engine=False, is_batch_invariant=True)
    bundle = SimpleNamespace(manifest=SimpleNamespace(block=BLOCK))

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.now, self.decoded = 0.0, 0
        self.rows = []
        for _ in range(NUM_ROWS):
            confidences = [
                [1 - draw.random() ** 12 for _ in range(BLOCK)] for _ in range(draw.randint(12, 40))
            ]
            right = [[draw.random() < c**0.2 for c in at] for at in confidences]
            self.rows.append((confidences, right))

    def perf_counter(self) -> float:
        return self.now

    def generate_each(
        self, prompts: Sequence[Any], configs: Sequence[GenerationConfig], *, batch: int
    ) -> Iterator[Completion]:
        assert batch in (1, BATCH)
        for prompt, config in zip(prompts, configs, strict=True):
            self.decoded += not config.exact and not config.one_token
            made, seconds = self.answer(prompt[0], config)
            self.now += seconds
            yield made

    def answer(self, row: int, config: GenerationConfig) -> tuple[Completion, float]:
        confidences, right = self.rows[row]
        tokens: list[int] = []
        stats = Stats()
        seconds, fed = COST.of(PROMPT + (0 if config.one_token else BLOCK - 1)), 0
        while len(tokens) < min(len(confidences), config.max_new_tokens):
            at, count = len(tokens), 1
            while count < min(BLOCK, len(confidences) - at):
                confidence = confidences[at][count]
                if config.exact or not config.passes(confidence):
                    stats.refused = max(stats.refused or 0.0, confidence)
                    break
                count += 1
            if stats.forwards:
                seconds += COST.of(fed + (0 if config.one_token else BLOCK - 1))
            fed, stats.forwards = count, stats.forwards + 1
            tokens += [at + k if not k or right[at][k] else -1 for k in range(count)]
        text = " ".join(map(str, tokens))
        return Completion(text, tuple(tokens), (), "eos", stats), seconds


def plainly(model: Model) -> race.Laps:
    """The laps of the plain procedure."""
    passed: list[tuple[float, str, float]] = []
    first = {"one token": model_speed(model, setting(1.0))}
    truth = [model.answer(i, setting(1.0))[0].text for i in range(NUM_ROWS)]
    for tau in GRID["probability"]:
        texts = [model.answer(i, setting(tau))[0].text for i in range(NUM_ROWS)]
        drops = np.array([float(a != b) for a, b in zip(texts, truth, strict=True)])
        if bounds.p_value(drops, OPTIONS.max_drop, OPTIONS.level) > OPTIONS.level:
            break
        passed.append((drops.mean(), f"tau {tau:g}", model_speed(model, setting(tau))))
    raced = first | {name: speed for _, name, speed in sorted(passed, key=lambda line: line[0])}
    return laps_of({name: [speed] * 3 for name, speed in raced.items()})


def model_speed(model: Model, config: GenerationConfig) -> float:
    """Tokens per second of the first 32 rows, decoded one at a time."""
    made = [model.answer(i, config) for i in range(32)]
    return sum(len(answer.token_ids) for answer, _ in made) / sum(seconds for _, seconds in made)


def made_by(model: Model, path: Path) -> Calibration:
    rows = [replace(task("x", limit=99), prompt_ids=(i,) * PROMPT, number=i + 1) for i in range(NUM_ROWS)]
    rows = [replace(row, source=f"row {row.number}") for row in rows]
    journal = Journal.open(path, {}, resume=False, force=True)
    session: Any = model
    return calibrate(Calibrator(session, journal, OPTIONS), Plan(tuple(rows)))


def test_the_choice_is_that_of_decoding_and_racing_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, same = [], 0
    for seed in range(SEEDS):
        model = Model(seed)
        monkeypatch.setattr(race, "time", model)
        made = made_by(model, tmp_path / f"state-{seed}.jsonl")
        name = made.chosen.measured.name if made.chosen else "one token"
        laps = plainly(model)
        other = race.choose(laps)[0]
        # A prediction knows the mean width of steps, so a lead at the very edge of a tie may go either way.
        assert name == other or abs(race.speedup(laps, name, other).median - race.TIE) < 0.005, f"seed {seed}"
        same += name == other
        choices.append(name)
        raced = race.ROUNDS * race.num_rows(NUM_ROWS, 1) + 1
        assert model.decoded - raced < 0.7 * NUM_ROWS * len(made.tested), "rows whose answer is known already"
    assert same >= SEEDS - 1
    assert len(set(choices)) > 2, "not always the same one"
