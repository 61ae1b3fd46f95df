"""The command that picks a tau: calibrate. Parse, one call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mars_export.runtime.console import (
    BundleArgument,
    Device,
    Json,
    Level,
    Threads,
    advance,
    err,
    listed,
    out,
    print_json,
    print_table,
    progress_bars,
)
from mars_export.runtime.errors import MarsError

if TYPE_CHECKING:
    from mars_export.calibration.run import Estimate

app = typer.Typer()


@app.command()
def calibrate(
    bundle: BundleArgument,
    task: Annotated[str, typer.Option("--task", "-t", help="A JSONL file of rows, or a built-in task: assistant, arithmetic.")],
    max_drop: Annotated[float, typer.Option(help="Largest mean quality loss against tau 1 that is bearable; 0.02 is two points.")] = 0.02,
    confidence: Annotated[float, typer.Option(help="How sure the bound has to be.")] = 0.95,
    compare: Annotated[str, typer.Option(help="Confidence metrics to try, with commas between; they share the error.")] = "probability",
    taus: Annotated[str | None, typer.Option(help="Candidates of the one metric, from safe to fast, with commas between.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; the task's by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the report and the state; calibration-NAME by default.")] = None,
    confirm: Annotated[Path | None, typer.Option(help="Rows that the choice never sees, to check it on.")] = None,
    score: Annotated[str | None, typer.Option(help="Metric of rows that name none: a known one, or your own as module:function.")] = None,
    allow_exec: Annotated[bool, typer.Option("--allow-exec", help="Allow metrics that run what the model writes. There is no sandbox.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most so many rows.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an earlier run left in the output folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Throw away what an earlier run left there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decode a few rows and say what all of them would cost.")] = False,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Whether the bundle gets the profile.")] = True,
    device: Device = "cpu",
    threads: Threads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Find the fastest tau that keeps the quality of a task, with a guarantee, and store it in the bundle as a profile."""
    from mars_export.calibration.plan import CalibrationOptions
    from mars_export.calibration.report import COLUMNS
    from mars_export.calibration.run import Request, estimate, run

    options = CalibrationOptions(max_drop, confidence, listed(compare), _numbers(taus), limit, batch)
    request = Request(bundle, task, output, name, confirm, score, allow_exec, device, threads, accuracy_level, resume, force, store, options)
    if dry_run:
        _show_estimate(estimate(request), as_json)
        return
    try:
        with progress_bars() as bars:
            report = run(request, advance(bars))
    except KeyboardInterrupt:
        err.print(f"stopped; what was decoded is kept in {request.folder}: the same command with --resume goes on", markup=False)
        raise typer.Exit(130) from None
    if as_json:
        print_json(report.to_dict())
        return
    out.print(report.headline, style="bold", markup=False)
    print_table(COLUMNS, report.table)
    for text in (report.confirmed, *(f"{name}: {value}" for name, value in report.facts)):
        if text is not None:
            out.print(text, markup=False)
    out.print(f"report    {request.folder / 'report.html'}", markup=False)
    if store:
        out.print(f"try: mars-export generate {bundle} --profile {request.profile_name} -p ...", markup=False)


def _show_estimate(found: Estimate, as_json: bool) -> None:
    if as_json:
        print_json(found.to_dict())
        return
    out.print(f"{found.num_rows} rows, {found.too_long} left out as too long; the bound needs {found.items_needed} rows at least")
    out.print(f"record pass {found.record_seconds / 60:.1f} min, everything at most {found.seconds / 60:.1f} min; testing ends at the first failure")
    print_table(("metric", "tau", "minutes"), [(metric, f"{tau:g}", f"{seconds / 60:.1f}") for metric, tau, seconds in found.candidates])
    print_table(("bound", "rows needed"), [(f"{drop:g}", str(rows)) for drop, rows in found.needed])


def _numbers(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in listed(text or ""))
    except ValueError as error:
        raise MarsError(f"--taus must be numbers with commas between, not {text!r}") from error
