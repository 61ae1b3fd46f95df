"""The commands over the rows of a task: calibrate picks a tau, bench measures speeds. Parse, one call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.console import (
    BundleArgument,
    Device,
    Json,
    Level,
    Threads,
    VariantName,
    advance,
    err,
    listed,
    out,
    print_json,
    print_table,
    progress_bars,
)
from ..runtime.errors import MarsError

if TYPE_CHECKING:
    from .bench.report import BenchReport
    from .tau.run import Estimate
    from .tau.setting import WindowSize

app = typer.Typer()

TASK_HELP = "A JSONL file of rows, or a built-in task: assistant, arithmetic."
Score = Annotated[
    str | None,
    typer.Option(help="Metric of rows that name none: a known one, or your own as module:function."),
]
AllowExec = Annotated[
    bool,
    typer.Option("--allow-exec", help="Allow metrics that run what the model writes. There is no sandbox."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with what an earlier run left in the output folder.")
]
Force = Annotated[bool, typer.Option("--force", help="Throw away what an earlier run left there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Decode a few rows and say what all of them would cost.")
]


@app.command()
def calibrate(
    bundle: BundleArgument,
    task: Annotated[str, typer.Option("--task", "-t", help=TASK_HELP)],
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
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the report and the state; calibration-NAME by default."
        ),
    ] = None,
    confirm: Annotated[
        Path | None, typer.Option(help="Rows that the choice never sees, to check it on.")
    ] = None,
    score: Score = None,
    allow_exec: AllowExec = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most so many rows.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Whether the bundle gets the profile.")
    ] = True,
    device: Device = "cpu",
    threads: Threads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Find the fastest tau that keeps the quality of a task, with a guarantee, and store it in the bundle as a profile."""
    from .rows import CalibrationOptions
    from .tau.report import COLUMNS
    from .tau.run import Request, estimate, run

    options = CalibrationOptions(
        max_drop, confidence, listed(compare), _numbers("--taus", taus), limit, batch
    )
    request = Request(
        bundle, task, output, score, allow_exec, device, threads, accuracy_level=accuracy_level, resume=resume, force=force,
        name=name, confirm=confirm, store=store, options=options,
    )  # fmt: skip
    if dry_run:
        _show_estimate(estimate(request), as_json)
        return
    try:
        with progress_bars() as bars:
            report = run(request, advance(bars))
    except KeyboardInterrupt:
        raise _stopped(request.folder) from None
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


@app.command()
def bench(
    bundle: BundleArgument,
    task: Annotated[str, typer.Option("--task", "-t", help=TASK_HELP)] = "assistant",
    tau: Annotated[
        str, typer.Option(help="Bounds to compare with one-token mode, with commas between.")
    ] = "0.95",
    batch: Annotated[str, typer.Option(help="Rows decoded at once, with commas between.")] = "1",
    window: Annotated[
        str,
        typer.Option(
            help="Most predictions of a step, with commas between: auto (chosen step by step), full, or numbers."
        ),
    ] = "auto",
    commit: Annotated[
        str, typer.Option(help="Cache loops, with commas between: cursor, block (the paper's).")
    ] = "cursor",
    cache_block: Annotated[int, typer.Option(min=1, help="Tokens of a cache block with block commit.")] = 32,
    limit: Annotated[
        int | None,
        typer.Option(help="Use at most so many rows: 16 by default, or four times the largest batch."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each setting decodes the rows.")] = 3,
    cursor: Annotated[
        int, typer.Option(help="Tokens in the cache where the cost of a step is measured.")
    ] = 256,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the report and the state; bench-TASK by default."),
    ] = None,
    score: Score = None,
    allow_exec: AllowExec = False,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: Threads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Measure what a step costs here, and one-token mode against MARS on the rows of a task."""
    from .bench.bench import BenchRequest, estimate
    from .bench.bench import bench as run_bench
    from .tau.setting import BenchOptions

    options = BenchOptions(
        _numbers("--tau", tau),
        _whole_numbers("--batch", batch),
        _windows(window),
        listed(commit),
        cache_block,
        rounds,
        limit,
        cursor,
    )
    request = BenchRequest(
        bundle,
        task,
        output,
        score,
        allow_exec,
        device,
        threads,
        variant,
        accuracy_level,
        resume,
        force,
        options,
    )
    if dry_run:
        found = estimate(request)
        if as_json:
            print_json(found.to_dict())
        else:
            out.print(
                f"{found.num_rows} rows at {found.num_settings} settings, {found.too_long} left out as too long",
                markup=False,
            )
            out.print(
                f"cost of a step {found.step_seconds / 60:.1f} min, answers {found.decode_seconds / 60:.1f} min"
            )
        return
    try:
        with progress_bars() as bars:
            report = run_bench(request, advance(bars))
    except KeyboardInterrupt:
        raise _stopped(request.folder) from None
    if as_json:
        print_json(report.to_dict())
    else:
        _show_bench(report, request.folder)


def _show_bench(report: BenchReport, folder: Path) -> None:
    out.print(report.headline, style="bold", markup=False)
    tables = {
        "whole answers; speed-up over one-token mode, lowest and highest round; peak memory": report.speed_table,
        "what a reader waits for, ms: median and 99th percentile": report.latency_table,
        f"a step, {report.cursor} tokens in the cache": report.cost_table,
    }
    for title, (head, *lines) in tables.items():
        out.print(f"\n{title}", style="dim", markup=False)
        print_table(head, lines, of_numbers=True)
    out.print()
    for line in report.facts:
        out.print(line, markup=False)
    out.print(f"report    {folder}", markup=False)


def _stopped(folder: Path) -> typer.Exit:
    err.print(
        f"stopped; what was done is kept in {folder}: the same command with --resume goes on", markup=False
    )
    return typer.Exit(130)


def _show_estimate(found: Estimate, as_json: bool) -> None:
    if as_json:
        print_json(found.to_dict())
        return
    out.print(
        f"{found.num_rows} rows, {found.too_long} left out as too long; the bound needs {found.items_needed} rows at least"
    )
    out.print(
        f"record pass {found.record_seconds / 60:.1f} min, everything at most {found.seconds / 60:.1f} min; testing ends at the first failure"
    )
    print_table(
        ("metric", "tau", "minutes"),
        [(metric, f"{tau:g}", f"{seconds / 60:.1f}") for metric, tau, seconds in found.candidates],
    )
    print_table(("bound", "rows needed"), [(f"{drop:g}", str(rows)) for drop, rows in found.needed])


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in listed(text or ""))
    except ValueError as error:
        raise MarsError(f"{option} must be numbers with commas between, not {text!r}") from error


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in listed(text))
    except ValueError as error:
        raise MarsError(f"{option} must be whole numbers with commas between, not {text!r}") from error


def _windows(text: str) -> tuple[WindowSize, ...]:
    """A word that is no number goes on to GenerationConfig as it is: what a window may be is said there."""
    from ..runtime.decode.config import FULL_WINDOW

    named = {"auto": None, "full": FULL_WINDOW}
    return tuple(
        named[word] if word in named else int(word) if word.isdecimal() else word for word in listed(text)
    )
