"""The commands over the rows of a task: calibrate picks a tau, bench measures. Parse, one call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.cli.console import (
    BundleArgument,
    Device,
    Json,
    Level,
    VariantName,
    listed,
    out,
    print_json,
    print_table,
)
from .task_command import (
    AllowExec,
    DryRun,
    Force,
    Output,
    Resume,
    Schema,
    Score,
    TaskName,
    TaskThreads,
    numbers,
    print_result,
    progress_of,
)

if TYPE_CHECKING:
    from ..runtime.decode.config import Window
    from .bench.bench import BenchEstimate
    from .bench.report import BenchReport
    from .tau.run import Estimate

app = typer.Typer()


@app.command()
def calibrate(
    bundle: BundleArgument,
    task: TaskName,
    max_drop: Annotated[
        float,
        typer.Option(help="Largest mean quality loss against tau 1 that is bearable; 0.02 is two points."),
    ] = 0.02,
    confidence: Annotated[float, typer.Option(help="How sure the bound has to be.")] = 0.95,
    compare: Annotated[
        str, typer.Option(help="Confidence metrics to try, with commas between; they share the error.")
    ] = "probability",
    taus: Annotated[
        str | None, typer.Option(help="Candidates of the one metric, from safe to fast, with commas between.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; the task's by default.")] = None,
    output: Output = None,
    confirm: Annotated[
        Path | None, typer.Option(help="Rows that the choice never sees, to check it on.")
    ] = None,
    score: Score = None,
    schema: Schema = None,
    allow_exec: AllowExec = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most N rows.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Whether the bundle gets the profile.")
    ] = True,
    device: Device = "cpu",
    threads: TaskThreads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Find the fastest tau that keeps the quality of a task, with a guarantee, compare it with exact mode,
    and store it in the bundle as a profile."""
    from .tau.options import CalibrationOptions
    from .tau.report import COLUMNS
    from .tau.run import PAGE_FILE, Request, estimate, run

    candidates = numbers("--taus", taus, float)
    options = CalibrationOptions(max_drop, confidence, listed(compare), candidates, limit, batch)
    where = (bundle, task, output, score, allow_exec, device, threads, None, accuracy_level, resume, force)
    request = Request(*where, schema=schema, name=name, confirm=confirm, store=store, options=options)
    if dry_run:
        print_result(estimate(request), as_json, _show_estimate)
        return
    with progress_of(request.folder) as progress:
        report = run(request, progress)
    if as_json:
        print_json(report.to_dict())
        return
    out.print(report.headline, style="bold", markup=False)
    if report.verdict is not None:
        out.print(report.verdict, style="bold", markup=False)
    print_table(COLUMNS, report.table)
    for text in (report.confirmed, *(f"{name}: {value}" for name, value in report.facts)):
        if text is not None:
            out.print(text, markup=False)
    if report.num_changed:
        out.print(f"answers changed: {report.num_changed}; the report has them, worst first", markup=False)
    out.print(f"report    {request.folder / PAGE_FILE}", markup=False)
    exact = report.calibration.exact
    if exact is not None and exact.suffices:
        out.print(f"try: mars-export generate {bundle} -p ... (exact mode, the default)", markup=False)
    elif store:
        out.print(f"try: mars-export generate {bundle} --profile {request.profile_name} -p ...", markup=False)


@app.command()
def bench(
    bundle: BundleArgument,
    task: TaskName = "assistant",
    tau: Annotated[
        str, typer.Option(help="Bounds to compare with one-token mode, with commas between.")
    ] = "0.95",
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Whether exact mode is compared, too.")
    ] = True,
    batch: Annotated[str, typer.Option(help="Rows decoded at once, with commas between.")] = "1",
    window: Annotated[
        str,
        typer.Option(
            help="Most predictions of a step, with commas between: auto (step by step), full, or numbers."
        ),
    ] = "auto",
    commit: Annotated[
        str, typer.Option(help="Cache loops, with commas between: cursor, block (the paper's).")
    ] = "cursor",
    cache_block: Annotated[int, typer.Option(min=1, help="Tokens of a cache block with block commit.")] = 32,
    limit: Annotated[
        int | None,
        typer.Option(help="Use at most N rows. Default: 16, or four times the largest batch."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each setting decodes the rows.")] = 3,
    cursor: Annotated[
        int, typer.Option(help="Tokens in the cache where the cost of a step is measured.")
    ] = 256,
    output: Output = None,
    score: Score = None,
    schema: Schema = None,
    allow_exec: AllowExec = False,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: TaskThreads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Measure what a step costs here, and one-token mode against exact mode and tau on the rows of a task."""
    from .bench.bench import BenchRequest, estimate
    from .bench.bench import bench as measure
    from .bench.settings import BenchOptions

    options = BenchOptions(
        taus=numbers("--tau", tau, float),
        batches=numbers("--batch", batch, int),
        windows=_windows(window),
        commits=listed(commit),
        cache_block=cache_block,
        rounds=rounds,
        limit=limit,
        cursor=cursor,
        exact=exact,
    )
    where = (bundle, task, output, score, allow_exec, device, threads, variant, accuracy_level, resume, force)
    request = BenchRequest(*where, schema=schema, options=options)
    if dry_run:
        print_result(estimate(request), as_json, _show_bench_estimate)
        return
    with progress_of(request.folder) as progress:
        report = measure(request, progress)
    print_result(report, as_json, _show_bench)
    if not as_json:
        out.print(f"report    {request.folder}", markup=False)


def _show_bench(report: BenchReport) -> None:
    out.print(report.headline, style="bold", markup=False)
    waits = "what a reader waits for, ms: median and 99th percentile"
    tables = {
        "whole answers; speed-up and its lowest and highest round; score's interval": report.speed_table,
        waits: report.latency_table,
        "a service whose batch is full": report.load_table,
        f"a step, {report.cursor} tokens in the cache": report.cost_table,
    }
    for title, (head, *lines) in tables.items():
        out.print(f"\n{title}", style="dim", markup=False)
        print_table(head, lines, of_numbers=True)
    out.print()
    for line in report.facts:
        out.print(line, markup=False)


def _show_bench_estimate(cost: BenchEstimate) -> None:
    rows = f"{cost.num_rows} rows at {cost.num_settings} settings, {cost.too_long} left out as too long"
    out.print(rows, markup=False)
    out.print(f"cost of a step {cost.step_seconds / 60:.1f} min, answers {cost.decode_seconds / 60:.1f} min")


def _show_estimate(cost: Estimate) -> None:
    rows = f"{cost.num_rows} rows, {cost.too_long} left out as too long"
    out.print(f"{rows}; the bound needs {cost.items_needed} rows at least")
    minutes = (
        f"record pass {cost.record_seconds / 60:.1f} min, everything at most {cost.seconds / 60:.1f} min"
    )
    out.print(f"{minutes}; testing ends at the first failure")
    lines = [(metric, f"{tau:g}", f"{seconds / 60:.1f}") for metric, tau, seconds in cost.candidates]
    print_table(("metric", "tau", "minutes"), lines)
    print_table(("bound", "rows needed"), [(f"{drop:g}", str(rows)) for drop, rows in cost.needed])


def _windows(text: str) -> tuple[Window, ...]:
    """A word that is no number goes on as it is: what a window may be is said where one is built."""
    return tuple(int(word) if word.isdecimal() else word for word in listed(text))  # type: ignore[misc]
