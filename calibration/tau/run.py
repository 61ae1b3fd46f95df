"""Runs a calibration: opens the bundle, calibrates, writes the report and stores the profile."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...runtime import machine
from ...runtime.bundle import profiles
from ...runtime.bundle.manifest import Profile
from ...runtime.bundle.open import open_bundle
from ...runtime.device.ort.library import version_and_devices
from ...runtime.errors import CalibrationError
from ...runtime.session.session import Session
from ..journal import Journal
from ..options import StateOptions
from ..rounds import Progress
from ..rows import Plan, TaskRequest, make_plan
from ..tasks.tasks import data_hash
from .calibrate import Calibration, Calibrator, Candidate, calibrate
from .options import CalibrationOptions, setting
from .report import CalibrationReport, markdown

STATE_FILES = "state-*.jsonl"
DATA_FILE, PAGE_FILE = "report.json", "report.md"


@dataclass(frozen=True, slots=True)
class CalibrationRequest(TaskRequest, StateOptions):
    """A request of `mars-export calibrate`."""

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
            raise CalibrationError(
                f"{self.bundle}: no tau can be calibrated: the bundle was exported without masks, for a model"
                " that was never trained to accept tokens without verification. Use exact mode, the default;"
                f" to measure it: mars-export bench {self.bundle} --task {self.task}"
            )
        # Settings share the prompts' KV entries.
        memory = (machine.available() or 0) // 4 if self.device == "cpu" else 0
        return TaskRequest.open(replace(self, cache_bytes=memory))

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
    """The key of finished work: the graph, its weights, and how it runs."""
    files = {entry.path: entry.sha256 for entry in session.bundle.manifest.files}
    variant = session.variant
    weights = files.get(variant.weights) if variant.weights else None
    level, block = variant.accuracy_level, session.bundle.manifest.block
    return {"graph": files[variant.file], "weights": weights, "level": level, "block": block}


def conditions(request: CalibrationRequest, session: Session, plan: Plan) -> dict[str, Any]:
    """The conditions that all measurements of one run share."""
    ort = version_and_devices()
    return {
        "batch": request.options.batch,
        "device": session.device,
        "threads": request.threads,
        "processor": f"{machine.processor()}, {machine.cores()} cores",
        "onnxruntime": ort[0] if ort else None,
        "rows": data_hash(plan.tasks),
    }


def run(request: CalibrationRequest, progress: Progress | None = None) -> CalibrationReport:
    """Calibrate, write the report's folder, and store the profile, if a tau was chosen. After an interruption
    the folder keeps the decoded rows.

    Raises CalibrationError for an unsuitable task, option or state, before anything is decoded.
    """
    busy, options, tasks, session = machine.load(), request.options, request.rows(), request.open()
    for metric in options.metrics:
        session.check(setting(options.candidates(metric)[0], metric))
    plan = make_plan(session, tasks, options.limit)
    if options.guarantee and len(plan.tasks) < options.items_needed:
        raise CalibrationError(
            f"{len(plan.tasks)} rows cannot show a drop below {options.max_drop:g} with"
            f" {100 * (1 - options.level):.3g} % confidence, even if none changes: {options.items_needed} are"
            " needed. Use more rows, a larger --max-drop, or --no-guarantee, which uses the mean drop of"
            " these rows"
        )
    if request.store and not os.access(request.bundle, os.W_OK):
        raise CalibrationError(
            f"{request.bundle}: the profile cannot be stored, because the bundle is read-only; --no-store"
            " leaves it unchanged"
        )
    journal = request.journal(session, conditions(request, session, plan))
    try:
        result = calibrate(Calibrator(session, journal, options, progress), plan)
    finally:
        journal.close()
    report = CalibrationReport(
        task=request.task_name,
        bundle=request.bundle.name,
        machine=request.machine,
        calibration=result,
        graph=_graph(session),
        profile=None if result.chosen is None else _profile(request, session, result, result.chosen, plan),
        load=busy,
    )
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    (request.folder / DATA_FILE).write_text(text + "\n", encoding="utf-8")
    (request.folder / PAGE_FILE).write_text(markdown(report), encoding="utf-8")
    if request.store and report.profile is not None:
        profiles.store(request.bundle, report.profile)
    return report


def _graph(session: Session) -> str:
    """The variant that was calibrated, with the hash of its graph."""
    variant = session.variant
    return f"variant {variant.name}, {variant.precision}, graph {identity(session)['graph'][:12]}"


def _profile(
    request: CalibrationRequest, session: Session, result: Calibration, choice: Candidate, plan: Plan
) -> Profile:
    """The choice as a profile of the bundle."""
    manifest, variant = session.bundle.manifest, session.variant
    options, point, exact = result.options, choice.measured, result.exact
    evidence = {
        "task": request.task_name,
        "data_sha256": data_hash(plan.tasks),
        "num_rows": result.num_rows,
        "judged_by": result.judges,
        "max_drop": options.max_drop,
        "confidence": options.confidence if options.guarantee else None,
        "drop": choice.drop,
        "drop_bound": choice.drop_bound,
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
        "masks": "full",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "notes": [exact.verdict, *result.notes],
    }
    return profiles.of_variant(
        manifest, variant, request.profile_name, evidence, tau=point.tau, metric=point.metric
    )
