"""Runs a benchmark: decodes rows in interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from ...runtime import machine
from ...runtime.session.session import Session
from ..rounds import Progress, interleaved
from ..rows import TaskRequest, make_plan
from ..tasks.tasks import TaskRow
from .compare import compare
from .laps import Lap, serve
from .report import BenchReport
from .settings import BenchOptions, Setting

WARM_TOKENS = 8
PHASE = "answers"  # of the progress


@dataclass(frozen=True, slots=True)
class BenchRequest(TaskRequest):
    """A request of `mars-export bench`."""

    options: BenchOptions = field(default_factory=BenchOptions)


def bench(request: BenchRequest, progress: Progress | None = None) -> BenchReport:
    """Measure all settings.

    Raises CalibrationError for an unsuitable task or option, before anything is measured.
    """
    busy, tasks, session, options = machine.load(), request.rows(), request.open(), request.options
    for setting in options.settings:
        session.check(setting.config(1))
    plan = make_plan(session, tasks, options.limit or options.slice_rows)
    return BenchReport(
        task=request.task_name,
        bundle=request.bundle.name,
        variant=session.variant.name,
        precision=session.variant.precision,
        block=session.bundle.manifest.block,
        machine=request.machine,
        load=busy,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        options=options,
        num_rows=len(plan.tasks),
        judges=plan.judges,
        too_long=plan.too_long,
        prompt_tokens=plan.prompt_range,
        compared=tuple(compare(plan.tasks, measure(session, plan.tasks, options, progress))),
    )


def measure(
    session: Session, tasks: Sequence[TaskRow], options: BenchOptions, progress: Progress | None = None
) -> dict[Setting, list[list[Lap]]]:
    """Each setting's laps by round."""
    for setting in options.settings:  # the first steps of a shape are slow
        few = [replace(task, max_new_tokens=WARM_TOKENS) for task in tasks[: setting.batch]]
        serve(session, few, setting)
    size, settings, rounds = options.slice_rows, options.settings, options.rounds
    parts = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    laps: dict[Setting, list[list[Lap]]] = {setting: [[] for _ in range(rounds)] for setting in settings}
    done, total = 0, rounds * len(tasks) * len(settings)
    for number, at, setting in interleaved(settings, len(parts), rounds):
        if progress:
            progress(PHASE, done, total)
        laps[setting][number].append(serve(session, parts[at], setting))
        done += len(parts[at])
    return laps
