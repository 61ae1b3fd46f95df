"""What passes and what is chosen are those of the plain procedure, which decodes every row at every setting
and races all that passed: on scripted models, with a clock without noise."""

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
from mars_export.calibration import rounds
from mars_export.calibration.journal import Journal
from mars_export.calibration.rows import Plan
from mars_export.calibration.tau import bounds, decoding, race
from mars_export.calibration.tau.calibrate import BATCH, Calibration, Calibrator, calibrate
from mars_export.calibration.tau.options import GRID, CalibrationOptions, setting
from mars_export.runtime.decode.speculation.cost import Cost

BLOCK, NUM_ROWS, PROMPT, SEEDS = 8, 100, 10, 20
COST = Cost(((1, 1.0), (8, 1.4), (15, 1.9), (32, 3.0)))
OPTIONS = CalibrationOptions(max_drop=0.2)


class Model:
    """A session with scripted answers: from each position, the confidence of each mask, and whether its token
    is right. Its clock knows the cost of the steps."""

    device, text = "cpu", SimpleNamespace()
    variant = SimpleNamespace(is_engine=False, is_batch_invariant=True)
    bundle = SimpleNamespace(manifest=SimpleNamespace(block=BLOCK))

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.now, self.rows_at_taus, self.steps_at_taus = 0.0, 0, 0
        self.rows = []
        for _ in range(NUM_ROWS):
            confidences = [
                [1 - draw.random() ** 12 for _ in range(BLOCK)] for _ in range(draw.randint(12, 40))
            ]
            right = [[draw.random() < c**0.2 for c in at] for at in confidences]
            self.rows.append((confidences, right))

    @property
    def cost(self) -> Cost:
        """As if the machine became slower all the time: settings must be compared at one moment."""
        return Cost(tuple((positions, seconds * (1 + self.now / 1000)) for positions, seconds in COST.points))

    def perf_counter(self) -> float:
        return self.now

    def generate_each(
        self, prompts: Sequence[Any], configs: Sequence[GenerationConfig], *, batch: int, drafts: Any
    ) -> Iterator[Completion]:
        assert batch in (1, BATCH) and len(drafts) in (0, len(prompts))
        for prompt, config in zip(prompts, configs, strict=True):
            made, seconds = self.answer(prompt[0], config, len(prompt) - PROMPT)
            self.now += seconds
            if not config.exact and not config.one_token and batch == BATCH:
                self.rows_at_taus += 1
                self.steps_at_taus += made.stats.forwards
            yield made

    def answer(self, row: int, config: GenerationConfig, begun: int = 0) -> tuple[Completion, float]:
        """The answer, or its rest after the first `begun` tokens, and its seconds."""
        confidences, right = [part[begun:] for part in self.rows[row]]
        tokens: list[int] = []
        stats = Stats()
        seconds, fed = COST.of(PROMPT + (0 if config.one_token else BLOCK - 1)), 0
        while len(tokens) < min(len(confidences), config.max_new_tokens):
            at, count, refused = len(tokens), 1, None
            while count < min(BLOCK, len(confidences) - at):
                confidence = confidences[at][count]
                if config.exact or not config.passes(confidence):
                    refused = None if config.exact else confidence
                    break
                count += 1
            if stats.forwards:
                seconds += COST.of(fed + (0 if config.one_token else BLOCK - 1))
            fed, stats.forwards = count, stats.forwards + 1
            stats.count(count, refused=refused)
            tokens += [begun + at + k if not k or right[at][k] else -1 for k in range(count)]
        return Completion(text_of(None, tokens), tuple(tokens), (), "length", stats), seconds


def text_of(_: object, token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def plainly(model: Model) -> tuple[dict[str, tuple[float, bool]], race.Laps, int]:
    """What the plain procedure tests, with the drops and whether they passed; its laps, and its steps."""
    tested: dict[str, tuple[float, bool]] = {}
    steps = 0
    truth = [model.answer(i, setting(1.0))[0].text for i in range(NUM_ROWS)]
    for tau in GRID["probability"]:
        made = [model.answer(i, setting(tau))[0] for i in range(NUM_ROWS)]
        steps += sum(answer.stats.forwards for answer in made)
        drops = np.array([float(a.text != b) for a, b in zip(made, truth, strict=True)])
        is_shown = bool(bounds.p_value(drops, OPTIONS.max_drop, OPTIONS.level) <= OPTIONS.level)
        tested[f"tau {tau:g}"] = (float(drops.mean()), is_shown)
        if not is_shown:
            break
    passed = [name for name, (_, passed) in tested.items() if passed]
    safe_first = sorted(passed, key=lambda name: tested[name][0])
    speeds = {name: model_speed(model, setting(float(name[4:]))) for name in safe_first}
    laps = {"one token": model_speed(model, setting(1.0))} | speeds
    return tested, laps_of({name: [speed] * 3 for name, speed in laps.items()}), steps


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
    monkeypatch.setattr(decoding, "text_of", text_of)
    choices = []
    for seed in range(SEEDS):
        model = Model(seed)
        monkeypatch.setattr(rounds, "time", model)
        made = made_by(model, tmp_path / f"state-{seed}.jsonl")
        tested, laps, steps = plainly(model)
        assert {t.measured.name: (t.drop, t.passed) for t in made.tested} == tested, f"seed {seed}"
        name = made.chosen.measured.name if made.chosen else "one token"
        assert name == race.choose(laps)[0], f"seed {seed}"
        choices.append(name)
        assert model.rows_at_taus < 0.7 * NUM_ROWS * len(tested), "rows whose answer is known already"
        assert model.steps_at_taus < 0.5 * steps, "steps that are known already"
    assert len(set(choices)) > 2, "not always the same one"
