"""A benchmark from a command's request to its report: opens, times steps, decodes in interleaved rounds. Draws no picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...runtime import Session
from ...runtime.errors import CalibrationError
from ..journal import Journal
from ..request import STATE_FILE, TaskRequest
from ..rows import CalibrationOptions, Plan, make_plan
from ..tasks.tasks import Task, data_hash
from ..tau.calibrate import Progress, identity
from ..tau.setting import BenchOptions, Setting
from . import report as bench_report
from .comparison import compare
from .cost_curve import SWEEPS, StepTimer, Sweep, curves
from .report import BenchReport
from .serving import Lap, serve

WARM_TOKENS = 8
TRIAL_ROWS = 2  # decoded at each setting for an estimate, or as many as the batch has
STEPS, ANSWERS = "cost of a step", "answers"  # phases of the progress


@dataclass(frozen=True, slots=True)
class BenchRequest(TaskRequest):
    """What `mars-export bench` is asked for."""

    options: BenchOptions = field(default_factory=BenchOptions)

    @property
    def folder(self) -> Path:
        return self.output or Path(f"bench-{self.stem}")


@dataclass(frozen=True, slots=True)
class BenchEstimate:
    """What a benchmark would take, in seconds."""

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
    """Measure and write the report folder. What was measured before an interruption is kept there.

    Raises CalibrationError for a task, options or a folder that do not allow it, before anything is measured.
    """
    load = _load()
    tasks = request.rows()
    session = request.open()
    plan = _plan(session, tasks, request.options)
    check_folder(request.folder, request.force)
    journal = Journal.open(
        request.folder / STATE_FILE, _work(request, session, plan), resume=request.resume, force=request.force
    )
    try:
        report = _measured(
            request, session, plan, Measurement(session, journal, request.options, progress), load
        )
    finally:
        journal.close()
    return bench_report.write(report, request.folder)


def estimate(request: BenchRequest) -> BenchEstimate:
    """Decode a handful of rows at each setting and say what everything would take. Writes nothing."""
    options, session = request.options, request.open()
    plan = _plan(session, request.rows(), options)
    timer = StepTimer(session, options.batches, options.cursor)
    timer.sweep(0)  # also warms up
    shapes = timer.sweep(0).values()
    steps = sum(shapes) / 1000 * 4 * SWEEPS * options.rounds
    decode = 0.0
    for setting in options.settings:
        some = plan.tasks[: max(TRIAL_ROWS, setting.batch)]
        decode += serve(session, some, setting).seconds / len(some) * len(plan.tasks) * options.rounds
    return BenchEstimate(len(plan.tasks), len(plan.too_long), len(options.settings), steps, decode)


class Measurement:
    """Sweeps and laps with a journal: what is in there is not measured again."""

    def __init__(
        self, session: Session, journal: Journal, options: BenchOptions, progress: Progress | None = None
    ) -> None:
        self.session, self.journal, self.options = session, journal, options
        self.report: Progress = progress or (lambda phase, done, total: None)

    def sweeps(self, timer: StepTimer) -> list[Sweep]:
        """The cost of a step in interleaved sweeps over all shapes."""
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
        """Every setting's laps by round. The rows go in slices, and each slice through all settings before the next slice."""
        settings, size = self.options.settings, self.options.slice_rows
        slices = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        made: dict[Setting, list[list[Lap]]] = {
            setting: [[] for _ in range(self.options.rounds)] for setting in settings
        }
        total, done, is_warm = self.options.rounds * len(tasks) * len(settings), 0, False
        self.report(ANSWERS, 0, total)
        for turn, (number, part) in enumerate(
            (n, i) for n in range(self.options.rounds) for i in range(len(slices))
        ):
            for setting in rotated(settings, turn):
                key = f"round {number + 1}, rows {part * size + 1}, {setting.name}"
                if key not in self.journal:
                    if not is_warm:
                        self._warm_up(tasks)
                        is_warm = True
                    self.journal[key] = serve(self.session, slices[part], setting).to_dict()
                made[setting][number].append(Lap.from_dict(self.journal[key]))
                done += len(slices[part])
                self.report(ANSWERS, done, total)
        return made

    def _warm_up(self, tasks: Sequence[Task]) -> None:
        for setting in self.options.settings:
            serve(
                self.session,
                [replace(task, max_new_tokens=WARM_TOKENS) for task in tasks[: setting.batch]],
                setting,
            )


def rotated(settings: Sequence[Setting], turn: int) -> Iterator[Setting]:
    """All settings, another one first each turn: none always runs after the same one, or always last."""
    turn %= len(settings)
    yield from (*settings[turn:], *settings[:turn])


def check_folder(folder: Path, force: bool) -> None:
    """Make the folder. Raises CalibrationError for a place where a report must not or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise CalibrationError(
            f"{folder}: a file is where the report's folder should be; give another with --output"
        )
    if folder.is_dir() and not force and not (folder / STATE_FILE).exists() and any(folder.iterdir()):
        raise CalibrationError(
            f"{folder}: the folder holds other files and no benchmark; give another with --output, or --force to write into it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(
            f"{folder}: the report's folder cannot be made: {error.strerror}; give another with --output"
        ) from error
    if not os.access(folder, os.W_OK):
        raise CalibrationError(f"{folder}: the report's folder is read-only; give another with --output")


def _plan(session: Session, tasks: Sequence[Task], options: BenchOptions) -> Plan:
    for setting in options.settings:
        session.check(setting.config(1))
    return make_plan(session, tasks, CalibrationOptions(limit=options.most_rows))


def _work(request: BenchRequest, session: Session, plan: Plan) -> dict[str, Any]:
    """What a state file's work belongs to. More rounds may be added later, other settings may not: they would not be interleaved."""
    settings = [setting.name for setting in request.options.settings]
    where = {"device": request.device, "threads": request.threads, "cursor": request.options.cursor}
    return {
        "kind": "bench",
        **identity(session),
        **where,
        "settings": settings,
        "data": data_hash(plan.tasks),
    }


def _measured(
    request: BenchRequest, session: Session, plan: Plan, measurement: Measurement, load: float | None
) -> BenchReport:
    options, manifest = request.options, session.bundle.manifest
    timer = StepTimer(session, options.batches, options.cursor)
    slots, cursor, capacity = timer.slots, timer.cursor, timer.capacity
    made = tuple(curves(measurement.sweeps(timer), options.batches, slots))
    del timer  # its KV memory is no part of what decoding takes
    compared = tuple(compare(plan.tasks, measurement.laps(plan.tasks)))
    return BenchReport(
        task=request.task_name,
        bundle=request.bundle.name,
        variant=session.variant.name,
        precision=session.variant.precision,
        block=manifest.block,
        machine=request.machine,
        load=load,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        options=options,
        num_rows=len(plan.tasks),
        judges=plan.judges,
        too_long=plan.too_long,
        prompt_tokens=(min(plan.prompt_tokens), max(plan.prompt_tokens)),
        cursor=cursor,
        capacity=capacity,
        curves=made,
        compared=compared,
    )


def _load() -> float | None:
    """What else keeps the machine busy: the mean number of running programs in the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # not on Windows
        return None
