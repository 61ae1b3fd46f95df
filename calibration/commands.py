"""The commands `calibrate`, which chooses a tau, and `bench`, which measures, on the rows of a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.terminal.console import advance, err, out, print_json, print_table, progress_bars
from ..runtime.terminal.options import BundleArgument, Json, VariantName, option, takes_options
from .options import BenchOptions, StateOptions, TaskOptions, numbers
from .tau.options import CalibrationOptions

if TYPE_CHECKING:
    from .bench import BenchReport

app = typer.Typer()
ROWS = "Rows and scores"  # panels of --help
SETTINGS = "Settings to compare"
TASK = option(ROWS, "A JSONL file of rows, or a built-in task: assistant, arithmetic.", "--task", "-t")


@app.command()
@takes_options
def calibrate(
    bundle: BundleArgument,
    task: Annotated[str, TASK],
    *,
    goal: CalibrationOptions,
    options: TaskOptions,
    state: StateOptions,
    as_json: Json = False,
) -> None:
    """Find the fastest tau that keeps the quality of a task, with a guarantee; compare it with exact mode,
    and store it in the bundle as a profile. If no tau is faster than tau 1, no profile is stored."""
    from .tau.report import COLUMNS
    from .tau.run import PAGE_FILE, CalibrationRequest, run

    request = CalibrationRequest(bundle, task, **asdict(options), **asdict(state), options=goal)
    with _progress(request.folder) as progress:
        report = run(request, progress)
    if as_json:
        print_json(report.to_dict())
        return
    out.print(report.headline, style="bold", markup=False)
    out.print(report.verdict, style="bold", markup=False)
    print_table(COLUMNS, report.table)
    for title, value in report.facts:
        out.print(f"{title}: {value}", markup=False)
    if report.num_changed:
        out.print(f"answers changed: {report.num_changed}; the report shows them, worst first", markup=False)
    out.print(f"report    {request.folder / PAGE_FILE}", markup=False)
    if report.profile is None and state.store:
        out.print("no profile was stored, because no tau is both safe and faster than tau 1", markup=False)
    if report.calibration.exact.suffices or report.profile is None:
        out.print(f"try: mars-export generate {bundle} -p ... (exact mode, the default)", markup=False)
    elif state.store:
        out.print(f"try: mars-export generate {bundle} --profile {request.profile_name} -p ...", markup=False)


@app.command()
@takes_options
def bench(
    bundle: BundleArgument,
    task: Annotated[str, TASK] = "assistant",
    *,
    taus: Annotated[
        str | None,
        option(
            SETTINGS,
            "Taus to compare with one-token mode, separated by commas: by default 0.95, and none for a bundle"
            " without masks.",
            "--tau",
        ),
    ] = None,
    compared: BenchOptions,
    variant: VariantName = None,
    options: TaskOptions,
    as_json: Json = False,
) -> None:
    """Compare one-token mode, exact mode and taus on the rows of a task: speed, latency and quality."""
    from ..runtime.bundle.open import open_bundle
    from .bench import BenchRequest
    from .bench import bench as measure

    if taus is None and open_bundle(bundle).manifest.tokens.mask is None:
        taus = ""
    if taus is not None:
        compared = replace(compared, taus=numbers("--tau", float)(taus))
    request = BenchRequest(bundle, task, **asdict(options), variant=variant, options=compared)
    with progress_bars() as bars:
        report = measure(request, advance(bars))
    if as_json:
        print_json(report.to_dict())
    else:
        _print_bench(report)


@contextmanager
def _progress(folder: Path) -> Iterator[Any]:
    """Progress bars. After Ctrl-C or SIGTERM, say where the state is kept and how to continue."""
    try:
        with progress_bars() as bars:
            yield advance(bars)
    except (KeyboardInterrupt, SystemExit) as stop:
        err.print(
            f"stopped; finished work is kept in {folder}. To continue: the same command with --resume",
            markup=False,
        )
        raise typer.Exit(getattr(stop, "code", 130)) from None


def _print_bench(report: BenchReport) -> None:
    out.print(report.headline, style="bold", markup=False)
    tables = {
        "whole answers; speed-up with its lowest and highest round; score with its interval": (
            report.speed_table
        ),
        "latency for a streaming client, ms: median and 99th percentile": report.latency_table,
        "a service with a full batch": report.load_table,
    }
    for title, (head, *lines) in tables.items():
        out.print(f"\n{title}", style="dim", markup=False)
        print_table(head, lines, of_numbers=True)
    out.print()
    for line in report.facts:
        out.print(line, markup=False)
