"""Runs a calibration: opens the bundle, calibrates, writes the report and stores the profile."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...runtime import machine
from ...runtime.bundle import profiles
from ...runtime.bundle.manifest import Profile
from ...runtime.bundle.open import open_bundle
from ...runtime.errors import CalibrationError
from ...runtime.session.session import Session
from ..journal import Journal
from ..rounds import Progress
from ..rows import Plan, TaskRequest, make_plan
from ..tasks.tasks import Task, data_hash
from . import bounds
from .calibrate import Calibration, Calibrator, calibrate, confirm
from .decoding import decode_example
from .options import EXACT, CalibrationOptions, setting
from .record import record, recorded_metrics
from .replay import predict
from .report import figure
from .report.drawing import require_matplotlib
from .report.report import CalibrationReport, markdown

EXAMPLES = 3
STATE_FILES = "state-*.jsonl"
TRIAL_ROWS = 4  # decoded for an estimate
BOUNDS = (0.01, 0.02, 0.03, 0.05, 0.1)  # of the table of rows needed
DATA_FILE, PICTURE_FILE, PAGE_FILE = "report.json", "pareto.png", "report.md"


@dataclass(frozen=True, slots=True)
class CalibrationRequest(TaskRequest):
    """A request of `mars-export calibrate`. `name` is the profile's; `confirm` is a file of rows that the
    choice does not see."""

    output: Path | None = None
    resume: bool = False  # continue from the state of an earlier run
    force: bool = False  # discard the state of an earlier run
    name: str | None = None
    confirm: Path | None = None
    store: bool = True
    options: CalibrationOptions = field(default_factory=CalibrationOptions)

    @property
    def profile_name(self) -> str:
        return self.name or self.stem

    @property
    def folder(self) -> Path:
        """The folder of the report and the state, one for each task and bundle."""
        bundle = self.bundle.resolve().name.removesuffix(".bundle")
        return self.output or Path(f"calibration-{self.profile_name}-{bundle}")

    def open(self) -> Session:
        """The bundle's session. Raises CalibrationError for a bundle that takes no tau."""
        manifest = open_bundle(self.bundle).manifest
        if manifest.tokens.mask is None:
            kind = "has draft adapters over a stock model" if manifest.draft else "was exported without masks"
            raise CalibrationError(
                f"{self.bundle}: no tau can be calibrated: this bundle {kind}, which was never trained to"
                " accept tokens without verification. Use exact mode, the default, which keeps the stock"
                f" model's text; to measure it: mars-export bench {self.bundle} --task {self.task}"
                f"{' --store NAME, which stores the fastest adapter' if manifest.draft else ''}"
            )
        return TaskRequest.open(self)

    def journal(self, session: Session, work: Mapping[str, Any]) -> Journal:
        """The state of this bundle and task in the folder, which is created. It may hold other bundles'
        states.

        Raises CalibrationError for a folder with other files and as Journal.open does, OSError for one that
        cannot be written.
        """
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        if not self.force and any(folder.iterdir()) and not any(folder.glob(STATE_FILES)):
            raise CalibrationError(
                f"{folder}: the folder has other files but no calibration (--force writes to it); choose"
                " another with --output"
            )
        key = json.dumps([identity(session), self.task_name], sort_keys=True)
        name = STATE_FILES.replace("*", hashlib.sha256(key.encode()).hexdigest()[:12])
        work = {**identity(session), **work}
        return Journal.open(folder / name, work, resume=self.resume, force=self.force)


def identity(session: Session) -> dict[str, Any]:
    """What finished work depends on: the graph, its weights, and how it runs."""
    files = {entry.path: entry.sha256 for entry in session.bundle.manifest.files}
    variant = session.variant
    weights = files.get(variant.weights) if variant.weights else None
    level, block = variant.accuracy_level, session.bundle.manifest.block
    return {"graph": files[variant.file], "weights": weights, "level": level, "block": block}


def run(request: CalibrationRequest, progress: Progress | None = None) -> CalibrationReport:
    """Calibrate, write the report's folder, and store the profile. After an interruption the folder keeps the
    decoded rows.

    Raises CalibrationError for an unsuitable task, option or state, before anything is decoded.
    """
    require_matplotlib()
    busy, options = machine.load(), request.options
    tasks = request.rows()
    others = _other_rows(request, tasks)
    session = request.open()
    plan = _plan(session, tasks, options)
    unseen = make_plan(session, others, options.limit) if others else None
    if request.store and not os.access(request.bundle, os.W_OK):
        raise CalibrationError(
            f"{request.bundle}: the profile cannot be stored, because the bundle is read-only; --no-store"
            " leaves it unchanged"
        )
    journal = request.journal(session, {"batch": options.batch})
    calibrator = Calibrator(session, journal, options, progress)
    try:
        result = calibrate(calibrator, plan)
        shown = EXACT if result.exact is not None and result.exact.suffices else result.config
        report = CalibrationReport(
            task=request.task_name,
            bundle=request.bundle.name,
            machine=request.machine,
            calibration=result,
            profile=_profile(request, session, result, plan),
            confirmation=confirm(calibrator, unseen, result.config) if unseen else None,
            examples=tuple(decode_example(session, task, shown) for task in plan.tasks[:EXAMPLES]),
            load=busy,
        )
    finally:
        journal.close()
    write(report, request.folder)
    if request.store:
        profiles.store(request.bundle, report.profile)
    return report


def write(report: CalibrationReport, folder: Path) -> None:
    """Write report.json, pareto.png and report.md. Needs matplotlib."""
    require_matplotlib()
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    (folder / DATA_FILE).write_text(text + "\n", encoding="utf-8")
    figure.save_png(report.calibration, folder / PICTURE_FILE)
    (folder / PAGE_FILE).write_text(markdown(report, PICTURE_FILE), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Estimate:
    """The largest possible cost of a calibration: seconds of the record pass and of each candidate."""

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


def estimate(request: CalibrationRequest) -> Estimate:
    """Decode a few rows and estimate the cost of all. Writes nothing."""
    options, session = request.options, request.open()
    plan = _plan(session, request.rows(), options)
    trial = plan.tasks[: max(TRIAL_ROWS, min(options.batch, 16))]
    warm = trial[0].config(setting(1.0)).with_values(max_new_tokens=1)
    session.generate(trial[0].prompt, warm)
    start = time.perf_counter()
    traces = list(record(session, trial, options.batch))
    seconds = len(plan.tasks) * (time.perf_counter() - start) / len(trial)
    limits, eos = [task.max_new_tokens for task in trial], session.bundle.manifest.tokens.eos
    candidates = []
    for metric in options.metrics:
        for tau in options.candidates(metric):
            gain = predict(traces, limits, metric, tau, eos).tokens_per_forward
            candidates.append((metric, tau, seconds / max(gain, 1.0)))
    drops = sorted({*BOUNDS, options.max_drop})
    needed = tuple((drop, bounds.items_needed(drop, options.level)) for drop in drops)
    return Estimate(
        len(plan.tasks), len(plan.too_long), options.items_needed, seconds, tuple(candidates), needed
    )


def _plan(session: Session, tasks: Sequence[Task], options: CalibrationOptions) -> Plan:
    lacking = [m for m in options.metrics if m not in recorded_metrics(session)]
    if lacking:
        raise CalibrationError(
            f"this bundle's graph has no {' and no '.join(lacking)}; export it with --metrics, or calibrate"
            " only probability"
        )
    return make_plan(session, tasks, options.limit)


def _other_rows(request: CalibrationRequest, tasks: Sequence[Task]) -> list[Task]:
    """The rows to confirm the choice on. Raises CalibrationError if some of them are calibration rows."""
    if request.confirm is None:
        return []
    others = request.rows(request.confirm)
    shared = {repr(t.prompt) for t in tasks} & {repr(t.prompt) for t in others}
    if shared:
        raise CalibrationError(
            f"{request.confirm}: {len(shared)} prompts are also in the calibration rows; a confirmation needs"
            " other rows"
        )
    return others


def _profile(request: CalibrationRequest, session: Session, result: Calibration, plan: Plan) -> Profile:
    """The choice as a profile of the bundle; tau 1 if no other could be shown."""
    manifest, variant = session.bundle.manifest, session.variant
    choice, options = result.chosen, result.options
    point, exact = choice.measured if choice else result.one_token, result.exact
    assert exact is not None, "a calibration always measures it"
    evidence = {
        "task": request.task_name,
        "data_sha256": data_hash(plan.tasks),
        "num_rows": result.num_rows,
        "judged_by": result.judges,
        "max_drop": options.max_drop,
        "confidence": options.confidence,
        "drop": choice.drop if choice else 0.0,
        "drop_bound": choice.drop_bound if choice else 0.0,
        "quality": point.quality,
        "quality_one_token": result.one_token.quality,
        "tokens_per_forward": point.tokens_per_forward,
        "tokens_per_second": point.tokens_per_second,
        "exact_drop": exact.drop,
        "exact_drop_bound": exact.drop_bound,
        "exact_tokens_per_forward": exact.tokens_per_forward,
        "exact_tokens_per_second": exact.tokens_per_second,
        "needed": not exact.suffices,
        "batch": options.batch,
        "prompt_tokens": list(result.prompt_range),
        "answer_tokens": list(result.answer_range),
        "backend": variant.backend,
        "device": request.device,
        "block": manifest.block,
        "window": "full",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "notes": [exact.verdict, *result.notes],
    }
    return profiles.of_variant(
        manifest, variant, request.profile_name, evidence, tau=point.tau, metric=point.metric
    )
