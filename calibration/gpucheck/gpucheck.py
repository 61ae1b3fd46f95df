"""All checks of a bundle on a device, in an order in which each needs only those before it. A state on disk
lets a run be made in parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

from ...runtime import MarsError, machine
from ...runtime.device.cuda import find_gpu
from ...runtime.device.name import DeviceName
from ...runtime.errors import CalibrationError
from ..journal import Journal
from ..rounds import Progress
from ..rows import identity
from . import checks, figures, page
from .outcome import CheckReport, Found, NotHere, Outcome
from .subject import Subject

Check = Callable[[Subject], Found]
CHECKS: dict[str, tuple[str, Check]] = {
    "opens": ("the bundle opens, and the device computes what is heavy", checks.opens),
    "kv": ("KV rows stay on the device", checks.stays),
    "tokens": ("one-token answers equal the CPU's", checks.tokens),
    "exact": ("exact mode gives the one-token text", checks.exact),
    "batcher": ("answers in a batch equal answers alone", checks.batches),
    "blocks": ("the paper's block commit", checks.block_commit),
    "prefix": ("what was read before is not read again", checks.prefixes),
    "grammar": ("an answer keeps to a choice of words", checks.grammars),
    "graphs": ("steps that ONNX Runtime captures say what plain ones say", checks.captured),
    "sampling": ("a seed gives one text", checks.sampling),
    "recovery": ("a bad request fails alone", checks.recovers),
    "steps": ("what a step costs", figures.steps),
    "speed": ("tokens a second, one row", figures.speed),
    "batches": ("tokens a second, batches", figures.batches),
    "first": ("time to the first token", figures.first),
    "growth": ("memory over many requests", figures.growth),
}
PACKAGES = (
    "mars-export",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu12",
    "cuda-bindings",
    "numpy",
)
STATE_FILE, DATA_FILE, PAGE_FILE = "state.jsonl", "gpucheck.json", "gpucheck.md"


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What `mars-export gpucheck` is asked for. `only`: names of checks, all of them if empty."""

    subject: Subject
    folder: Path
    only: tuple[str, ...] = ()
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if strange := sorted(set(self.only) - CHECKS.keys()):
            raise CalibrationError(f"unknown checks: {', '.join(strange)} (known: {', '.join(CHECKS)})")


def gpucheck(request: CheckRequest, progress: Progress | None = None) -> CheckReport:
    """Make the checks and write the folder's JSON and page after each. What passed before, by the state, is
    not made again; checks that were not asked for are in the report as "not run".

    Raises SessionError when the bundle does not open on the device at all, CalibrationError for a state of
    other work.
    """
    subject, report = request.subject, progress or (lambda phase, done, total: None)
    session = subject.session
    names = [name for name in CHECKS if not request.only or name in request.only]
    work = {"kind": "gpucheck", **identity(session), "device": subject.device, "rows": subject.rows}
    journal = Journal.open(
        request.folder / STATE_FILE, work, resume=request.resume or bool(request.only), force=request.force
    )
    try:
        for done, name in enumerate(names):
            report(CHECKS[name][0], done, len(names))
            if name not in journal or journal.read(name, Outcome).state != "passed":
                journal[name] = make(name, subject)
            found = _report(subject, journal)
            write(found, request.folder)
        report("done", len(names), len(names))
        return found
    finally:
        journal.close()


def make(name: str, subject: Subject) -> Outcome:
    """One check. What it raises of ours, or of the libraries below, is its outcome; Ctrl-C is not."""
    title, check = CHECKS[name]
    began = perf_counter()
    outcome = partial(Outcome, name, title)
    try:
        found = check(subject)
    except NotHere as reason:
        return outcome("not run", str(reason), {}, round(perf_counter() - began, 2))
    except (MarsError, MemoryError, RuntimeError) as error:
        words = str(error) or type(error).__name__
        return outcome("failed", words, {}, round(perf_counter() - began, 2))
    return outcome(
        "passed" if found.good else "failed", found.detail, found.figures, round(perf_counter() - began, 2)
    )


def _report(subject: Subject, journal: Journal) -> CheckReport:
    outcomes = [
        journal.read(name, Outcome)
        if name in journal
        else Outcome(name, title, "not run", "not asked for", {}, 0.0)
        for name, (title, _) in CHECKS.items()
    ]
    session = subject.session
    return CheckReport(
        bundle=subject.path.resolve().name,
        variant=session.variant.name,
        precision=session.variant.precision,
        block=session.bundle.manifest.block,
        device=subject.device,
        device_name=device_name(subject.device),
        versions=installed(PACKAGES),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        outcomes=tuple(outcomes),
    )


def device_name(device: str) -> str:
    """What computes: the GPU with its capability and driver, or the processor."""
    if device == "cpu":
        return machine.processor() or "a CPU"
    gpu = find_gpu(DeviceName.of(device).ordinal)
    return gpu if isinstance(gpu, str) else f"{gpu.name} ({gpu.capability}, driver of CUDA {gpu.driver})"


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that are here."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(report: CheckReport, folder: Path) -> None:
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    (folder / DATA_FILE).write_text(text + "\n", encoding="utf-8")
    (folder / PAGE_FILE).write_text(page.markdown(report), encoding="utf-8")
