"""Runs a benchmark: decodes rows in interleaved rounds, and stores the fastest draft adapter as a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from ...runtime import machine
from ...runtime.bundle import profiles
from ...runtime.bundle.manifest import Profile
from ...runtime.errors import CalibrationError
from ...runtime.session.session import Session
from ..rounds import Progress, interleaved
from ..rows import Plan, TaskRequest, make_plan
from ..tasks.tasks import TaskRow, data_hash
from .compare import Comparison, compare
from .laps import Lap, serve
from .report import BenchReport
from .settings import BenchOptions, Setting

WARM_TOKENS = 8
PHASE = "answers"  # of the progress


@dataclass(frozen=True, slots=True)
class BenchRequest(TaskRequest):
    """A request of `mars-export bench`. `store`: name of a profile for the fastest draft adapter."""

    options: BenchOptions = field(default_factory=BenchOptions)
    store: str | None = None


def bench(request: BenchRequest, progress: Progress | None = None) -> BenchReport:
    """Measure all settings.

    The fastest draft adapter is stored in the bundle as the profile `request.store`, if it is faster than
    one-token mode. Raises CalibrationError for an unsuitable task or option, before anything is measured.
    """
    busy, tasks, session, options = machine.load(), request.rows(), request.open(), request.options
    for setting in options.settings:
        session.check(setting.config(1))
    plan = make_plan(session, tasks, options.limit or options.slice_rows)
    if request.store is not None:
        _check_store(request)
    report = BenchReport(
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
    best = report.fastest_adapter
    if request.store is None or best is None or best.speed_up.median <= 1:
        return report
    profiles.store(request.bundle, _profile(request, request.store, session, plan, report, best))
    return replace(report, stored=request.store)


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


def _check_store(request: BenchRequest) -> None:
    if not any(setting.draft for setting in request.options.settings):
        raise CalibrationError(
            f"{request.bundle}: --store stores the fastest draft adapter as a profile, and no setting has"
            f" one; to store a tau: mars-export calibrate {request.bundle} --task {request.task}"
        )
    request.check_writable("leave out --store")


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
    settings = {"tau": None, "metric": "probability", "masks": setting.masks, "draft": setting.draft}
    return profiles.of_variant(session.bundle.manifest, session.variant, name, evidence, **settings)
