"""Runs a benchmark: times steps, decodes rows in interleaved rounds into a report, and stores the fastest
draft adapter as a profile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from ...runtime import machine
from ...runtime.bundle import profiles
from ...runtime.bundle.manifest import Profile
from ...runtime.errors import CalibrationError
from ...runtime.session.session import Session
from ..rounds import Progress, interleaved, slices
from ..rows import Plan, TaskRequest, make_plan
from ..tasks.tasks import Task, data_hash
from .compare import Comparison, compare
from .laps import Lap, serve
from .report import BenchReport
from .settings import BenchOptions, Setting
from .steps import SWEEPS, StepTimer, Sweep, curves

WARM_TOKENS = 8
STEPS, ANSWERS = "cost of a step", "answers"  # phases of the progress


@dataclass(frozen=True, slots=True)
class BenchRequest(TaskRequest):
    """A request of `mars-export bench`. `store`: name of a profile for the fastest draft adapter."""

    options: BenchOptions = field(default_factory=BenchOptions)
    store: str | None = None


def bench(request: BenchRequest, progress: Progress | None = None) -> BenchReport:
    """Measure the cost of a step and all settings.

    The fastest draft adapter is stored in the bundle as the profile `request.store`, if it is faster than
    one-token mode. Raises CalibrationError for an unsuitable task or option, before anything is measured.
    """
    busy, tasks, session = machine.load(), request.rows(), request.open()
    plan = _plan(session, tasks, request.options)
    if request.store is not None:
        _check_store(request)
    report = _measured(request, session, plan, Measurement(session, request.options, progress), busy)
    best = report.fastest_adapter
    if request.store is None or best is None or best.speed_up.median <= 1:
        return report
    profiles.store(request.bundle, _profile(request, request.store, session, plan, report, best))
    return replace(report, stored=request.store)


class Measurement:
    """Sweeps and laps in interleaved rounds."""

    def __init__(self, session: Session, options: BenchOptions, progress: Progress | None = None) -> None:
        self.session, self.options = session, options
        self.report: Progress = progress or (lambda phase, done, total: None)

    def sweeps(self, timer: StepTimer) -> list[Sweep]:
        """The cost of a step, in interleaved sweeps over all shapes."""
        timer.sweep(0)  # the first steps of a shape are slow
        sweeps, total = [], SWEEPS * self.options.rounds
        for turn in range(total):
            self.report(STEPS, turn, total)
            sweeps.append(timer.sweep(turn))
        self.report(STEPS, total, total)
        return sweeps

    def laps(self, tasks: Sequence[Task]) -> dict[Setting, list[list[Lap]]]:
        """Each setting's laps by round. Each slice of the rows goes through all settings before the next
        slice.
        """
        settings, rounds, size = self.options.settings, self.options.rounds, self.options.slice_rows
        parts = slices(tasks, size)
        laps: dict[Setting, list[list[Lap]]] = {s: [[] for _ in range(rounds)] for s in settings}
        total, done = rounds * len(tasks) * len(settings), 0
        self.report(ANSWERS, 0, total)
        self._warm_up(tasks)
        for number, at, setting in interleaved(settings, len(parts), rounds):
            laps[setting][number].append(serve(self.session, parts[at], setting))
            done += len(parts[at])
            self.report(ANSWERS, done, total)
        return laps

    def _warm_up(self, tasks: Sequence[Task]) -> None:
        for setting in self.options.settings:
            few = [replace(task, max_new_tokens=WARM_TOKENS) for task in tasks[: setting.batch]]
            serve(self.session, few, setting)


def _plan(session: Session, tasks: Sequence[Task], options: BenchOptions) -> Plan:
    for setting in options.settings:
        session.check(setting.config(1))
    plan = make_plan(session, tasks, options.most_rows)
    if "block" in options.commits and any(task.form for task in plan.tasks):
        raise CalibrationError(
            "block commit does not support schema, regex, choice or tools, which rows of this task have;"
            " leave out --commit block"
        )
    return plan


def _check_store(request: BenchRequest) -> None:
    if not any(setting.draft for setting in request.options.settings):
        raise CalibrationError(
            f"{request.bundle}: --store stores the fastest draft adapter as a profile, and no setting has"
            f" one; to store a tau: mars-export calibrate {request.bundle} --task {request.task}"
        )
    if not os.access(request.bundle, os.W_OK):
        raise CalibrationError(
            f"{request.bundle}: the profile cannot be stored, because the bundle is read-only; leave out"
            " --store"
        )


def _profile(
    request: BenchRequest, name: str, session: Session, plan: Plan, report: BenchReport, best: Comparison
) -> Profile:
    """The setting of `best` as a profile of the bundle."""
    setting = best.setting
    evidence = {
        "task": report.task,
        "data_sha256": data_hash(plan.tasks),
        "num_rows": report.num_rows,
        "speed_up": best.speed_up.median,
        "tokens_per_forward": best.tokens_per_forward,
        "tokens_per_second": best.tokens_per_second.median,
        "batch": setting.batch,
        "device": request.device,
        "block": report.block,
        "date": report.date,
        "notes": report.notes,
    }
    settings = {"tau": None, "metric": "probability", "window": setting.window, "draft": setting.draft}
    return profiles.of_variant(session.bundle.manifest, session.variant, name, evidence, **settings)


def _measured(
    request: BenchRequest, session: Session, plan: Plan, measurement: Measurement, busy: float | None
) -> BenchReport:
    options, variant = request.options, session.variant
    timer = StepTimer(session, options.batches, options.cursor)
    slots, cursor, capacity = timer.slots, timer.cursor, timer.capacity
    costs = tuple(curves(measurement.sweeps(timer), options.batches, slots))
    del timer  # its KV memory must not count as decoding's
    return BenchReport(
        task=request.task_name,
        bundle=request.bundle.name,
        variant=variant.name,
        precision=variant.precision,
        block=session.bundle.manifest.block,
        machine=request.machine,
        load=busy,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        options=options,
        num_rows=len(plan.tasks),
        judges=plan.judges,
        too_long=plan.too_long,
        prompt_tokens=plan.prompt_range,
        cursor=cursor,
        capacity=capacity,
        curves=costs,
        compared=tuple(compare(plan.tasks, measurement.laps(plan.tasks))),
    )
