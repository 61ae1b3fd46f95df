"""One calibration from a command's request to its report: opens, decodes, writes the report and stores the profile."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...runtime import GenerationConfig, Session
from ...runtime.bundle import profiles
from ...runtime.decode.config import FULL_WINDOW
from ...runtime.errors import CalibrationError
from ..journal import Journal
from ..request import STATE_FILE, TaskRequest
from ..rows import CalibrationOptions, Plan, make_plan
from ..tasks.tasks import Task, load
from . import bounds, report
from .calibrate import Calibrator, Progress, calibrate, identity
from .examples import decode_examples
from .profile import confirm, make_profile
from .record import record
from .replay import predict
from .report import Report

EXAMPLES = 3
TRIAL_ROWS = 4  # decoded for an estimate
BOUNDS = (0.01, 0.02, 0.03, 0.05, 0.1)  # of the table of rows needed


@dataclass(frozen=True, slots=True)
class Request(TaskRequest):
    """What `mars-export calibrate` is asked for. `name` is the profile's; `confirm` a file of rows that the choice never sees."""

    name: str | None = None
    confirm: Path | None = None
    store: bool = True
    options: CalibrationOptions = field(default_factory=CalibrationOptions)

    @property
    def profile_name(self) -> str:
        return self.name or self.stem

    @property
    def folder(self) -> Path:
        return self.output or Path(f"calibration-{self.profile_name}")


def run(request: Request, progress: Progress | None = None) -> Report:
    """Calibrate, write the report folder and store the profile. What was decoded before an interruption is kept.

    Raises CalibrationError for a task, options or a state that do not allow it, before anything is decoded.
    """
    report.require_matplotlib()
    tasks = request.rows()
    others = (
        load(request.confirm, score=request.score, allow_exec=request.allow_exec) if request.confirm else []
    )
    _check_apart(tasks, others, request.confirm)
    session = request.open()
    plan = make_plan(session, tasks, request.options)
    if request.store and not os.access(request.bundle, os.W_OK):
        raise CalibrationError(
            f"{request.bundle}: the profile cannot be stored, the bundle is read-only; --no-store leaves it as it is"
        )
    work = identity(session) | {"batch": request.options.batch}
    journal = Journal.open(request.folder / STATE_FILE, work, resume=request.resume, force=request.force)
    try:
        made = _calibrated(
            request,
            session,
            Calibrator(session, journal, request.options.batch, progress),
            plan,
            tasks,
            others,
        )
    finally:
        journal.close()
    report.write(made, request.folder)
    if request.store:
        profiles.store(request.bundle, made.profile)
    return made


def _calibrated(
    request: Request,
    session: Session,
    calibrator: Calibrator,
    plan: Plan,
    tasks: Sequence[Task],
    others: Sequence[Task],
) -> Report:
    calibration = calibrate(calibrator, tasks, request.options)
    profile = make_profile(
        session, calibration, request.profile_name, request.task_name, plan.tasks, request.device
    )
    config = GenerationConfig(tau=profile.tau, metric=profile.metric, window=profile.window or FULL_WINDOW)
    confirmation = confirm(calibrator, others, config, request.options) if others else None
    shown = decode_examples(session, plan.tasks[:EXAMPLES], config)
    return Report(
        request.task_name, request.bundle.name, request.machine, calibration, profile, confirmation, shown
    )


def _check_apart(tasks: Sequence[Task], others: Sequence[Task], file: Path | None) -> None:
    shared = {repr(t.prompt) for t in tasks} & {repr(t.prompt) for t in others}
    if shared:
        raise CalibrationError(
            f"{file}: {len(shared)} prompts are also in the calibration rows; a confirmation needs rows that the choice never saw"
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a calibration would cost at most: seconds for the record pass and for each candidate, if all of them are tested."""

    num_rows: int
    too_long: int
    items_needed: int
    record_seconds: float
    candidates: tuple[tuple[str, float, float], ...]  # metric, tau, seconds
    needed: tuple[tuple[float, int], ...]  # bound, rows

    @property
    def seconds(self) -> float:
        return self.record_seconds + sum(seconds for *_, seconds in self.candidates)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


def estimate(request: Request) -> Estimate:
    """Decode a handful of rows and say what all of them would cost. Writes nothing."""
    options = request.options
    session = request.open()
    plan = make_plan(session, request.rows(), options)
    some = plan.tasks[: max(TRIAL_ROWS, min(options.batch, 16))]
    session.generate(some[0].prompt, GenerationConfig(max_new_tokens=1))  # warm up
    began = time.perf_counter()
    traces = list(record(session, some, options.batch))
    per_row = (time.perf_counter() - began) / len(some)
    rows, eos = len(plan.tasks), session.bundle.manifest.tokens.eos
    candidates = []
    for metric in options.metrics:
        for tau in options.candidates(metric):
            faster = predict(traces, plan.limits[: len(some)], metric, tau, eos).tokens_per_forward
            candidates.append((metric, tau, rows * per_row / max(faster, 1.0)))
    table = tuple(
        (drop, bounds.items_needed(drop, options.level)) for drop in sorted({*BOUNDS, options.max_drop})
    )
    return Estimate(rows, len(plan.too_long), options.items_needed, rows * per_row, tuple(candidates), table)
