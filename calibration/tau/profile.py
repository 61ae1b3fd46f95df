"""A calibration's result as a profile of the bundle, and its check on rows that the choice never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ...runtime import GenerationConfig, Session
from ...runtime.bundle.manifest import Profile
from ...runtime.bundle.profiles import sha256_of
from ..rows import CalibrationOptions, make_plan
from ..tasks.tasks import Task, data_hash
from . import bounds
from .calibrate import Calibration, Calibrator, Measured, measure


def make_profile(
    session: Session, calibration: Calibration, name: str, task: str, tasks: Sequence[Task], device: str
) -> Profile:
    """The chosen setting as a profile named `name`, tau 1 where nothing else could be shown. `task` is the task's name or file name."""
    manifest, variant = session.bundle.manifest, session.variant
    graph = sha256_of(manifest, variant.file)
    assert graph is not None, "an opened bundle lists its graph"
    chosen, options = calibration.chosen, calibration.options
    measured = chosen.measured if chosen else calibration.one_token
    evidence = {
        "task": task,
        "data_sha256": data_hash(tasks),
        "num_rows": calibration.num_rows,
        "judged_by": calibration.judges,
        "max_drop": options.max_drop,
        "confidence": options.confidence,
        "drop": chosen.drop if chosen else 0.0,
        "drop_bound": chosen.drop_bound if chosen else 0.0,
        "quality": measured.quality,
        "quality_one_token": calibration.one_token.quality,
        "tokens_per_forward": measured.tokens_per_forward,
        "tokens_per_second": measured.tokens_per_second,
        "batch": options.batch,
        "prompt_tokens": list(calibration.prompt_range),
        "answer_tokens": list(calibration.answer_range),
        "backend": variant.backend,
        "device": device,
        "block": manifest.block,
        "window": "full",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "notes": list(calibration.notes),
    }
    weights = sha256_of(manifest, variant.weights)
    return Profile(
        name,
        measured.tau,
        measured.metric,
        variant.name,
        graph,
        evidence,
        weights,
        variant.precision,
        accuracy_level=variant.accuracy_level,
    )


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The chosen setting against one-token mode on other rows. One look, so its bound needs no correction."""

    one_token: Measured
    chosen: Measured
    drop: float
    drop_bound: float
    held: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def confirm(
    calibrator: Calibrator, tasks: Sequence[Task], config: GenerationConfig, options: CalibrationOptions
) -> Confirmation:
    """Decode other rows in one-token mode and with `config`. `held`: the mean drop on them is at most the bound."""
    plan = make_plan(calibrator.session, tasks, options)
    plain = calibrator.outcomes(plan.tasks, GenerationConfig(tau=1.0))
    fast = plain if config.one_token else calibrator.outcomes(plan.tasks, config)
    before, after = (
        np.array(
            [task.score(o.output, p.output) for task, o, p in zip(plan.tasks, outcomes, plain, strict=True)]
        )
        for outcomes in (plain, fast)
    )
    agreement = sum(o.token_ids == p.token_ids for o, p in zip(fast, plain, strict=True)) / len(plain)
    drops = before - after
    one_token = measure("probability", 1.0, plain, before, 1.0, options)
    chosen = measure(config.metric, config.tau, fast, after, agreement, options)
    bound = bounds.upper_bound(drops, 1 - options.confidence)
    return Confirmation(one_token, chosen, float(drops.mean()), bound, bool(drops.mean() <= options.max_drop))
