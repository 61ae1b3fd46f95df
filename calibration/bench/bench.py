"""Runs a benchmark: times steps, decodes rows in interleaved rounds, and writes the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...runtime.errors import CalibrationError
from ...runtime.session.session import Session
from ..drawing import require_matplotlib
from ..journal import Journal
from ..rounds import Progress, interleaved, machine_load, slices
from ..rows import Plan, TaskRequest, make_plan
from ..tasks.tasks import Task, data_hash
from . import figure
from .compare import compare
from .laps import Lap, serve
from .report import BenchReport
from .settings import BenchOptions, Setting
from .steps import SWEEPS, StepTimer, Sweep, curves

WARM_TOKENS = 8
TRIAL_ROWS = 2  # decoded at each setting for an estimate, or as many as the batch has
STEPS, ANSWERS = "cost of a step", "answers"  # phases of the progress
DATA_FILE, PICTURE_FILE = "bench.json", "bench.png"


@dataclass(frozen=True, slots=True)
class BenchRequest(TaskRequest):
    """A request of `mars-export bench`."""

    prefix, kind = "bench", "benchmark"
    options: BenchOptions = field(default_factory=BenchOptions)


@dataclass(frozen=True, slots=True)
class BenchEstimate:
    """The estimated duration of a benchmark, in seconds."""

    num_rows: int
    too_long: int
    num_settings: int
    step_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        return self.step_seconds + self.decode_seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


def bench(request: BenchRequest, progress: Progress | None = None) -> BenchReport:
    """Measure, and write the report's folder. After an interruption it keeps the measurements.

    Raises CalibrationError for an unsuitable task, option or folder, before anything is measured.
    """
    busy, tasks, session = machine_load(), request.rows(), request.open()
    plan = _plan(session, tasks, request.options)
    journal = request.journal(session, _work(request, plan))
    measurement = Measurement(session, journal, request.options, progress)
    try:
        report = _measured(request, session, plan, measurement, busy)
    finally:
        journal.close()
    return write(report, request.folder)


def write(report: BenchReport, folder: Path) -> BenchReport:
    """Write bench.json and, with matplotlib, bench.png to `folder`; returns the report as written."""
    try:
        require_matplotlib()
        figure.save_png(report, folder / PICTURE_FILE)
    except CalibrationError as error:
        report = replace(report, no_picture=str(error))
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    (folder / DATA_FILE).write_text(text + "\n", encoding="utf-8")
    return report


def estimate(request: BenchRequest) -> BenchEstimate:
    """Decode a few rows at each setting and estimate the duration of all. Writes nothing."""
    options, session = request.options, request.open()
    plan = _plan(session, request.rows(), options)
    timer = StepTimer(session, options.batches, options.cursor)
    timer.sweep(0)  # also warms up
    steps = sum(timer.sweep(0).values()) / 1000 * 4 * SWEEPS * options.rounds
    decode = 0.0
    for setting in options.settings:
        some = plan.tasks[: max(TRIAL_ROWS, setting.batch)]
        decode += serve(session, some, setting).seconds / len(some) * len(plan.tasks) * options.rounds
    return BenchEstimate(len(plan.tasks), len(plan.too_long), len(options.settings), steps, decode)


class Measurement:
    """Sweeps and laps with a journal: what it holds is not measured again."""

    def __init__(
        self, session: Session, journal: Journal, options: BenchOptions, progress: Progress | None = None
    ) -> None:
        self.session, self.journal, self.options = session, journal, options
        self.report: Progress = progress or (lambda phase, done, total: None)

    def sweeps(self, timer: StepTimer) -> list[Sweep]:
        """The cost of a step, in interleaved sweeps over all shapes."""
        keys = [f"sweep {i + 1}" for i in range(SWEEPS * self.options.rounds)]
        if any(key not in self.journal for key in keys):
            timer.sweep(0)  # the first steps of a shape are slow
        for i, key in enumerate(keys):
            self.report(STEPS, i, len(keys))
            if key not in self.journal:
                self.journal[key] = dict(timer.sweep(i))
        self.report(STEPS, len(keys), len(keys))
        return [self.journal[key] for key in keys]

    def laps(self, tasks: Sequence[Task]) -> dict[Setting, list[list[Lap]]]:
        """Each setting's laps by round. Each slice of the rows goes through all settings before the next
        slice.
        """
        settings, rounds, size = self.options.settings, self.options.rounds, self.options.slice_rows
        parts = slices(tasks, size)
        laps: dict[Setting, list[list[Lap]]] = {s: [[] for _ in range(rounds)] for s in settings}
        total, done, is_warm = rounds * len(tasks) * len(settings), 0, False
        self.report(ANSWERS, 0, total)
        for number, at, setting in interleaved(settings, len(parts), rounds):
            key = f"round {number + 1}, rows {at * size + 1}, {setting.name}"
            if key not in self.journal:
                if not is_warm:
                    self._warm_up(tasks)
                    is_warm = True
                self.journal[key] = serve(self.session, parts[at], setting)
            laps[setting][number].append(self.journal.read(key, Lap))
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


def _work(request: BenchRequest, plan: Plan) -> dict[str, Any]:
    """The identity of the work. Rounds may be added later; settings may not, as they are interleaved."""
    return {
        "kind": "bench",
        "device": request.device,
        "threads": request.threads,
        "cursor": request.options.cursor,
        "settings": [setting.name for setting in request.options.settings],
        "data": data_hash(plan.tasks),
    }


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
