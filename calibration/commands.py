"""The commands `calibrate`, which chooses a tau, and `bench`, which measures, on the rows of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..runtime.errors import MarsError
from ..runtime.terminal.console import advance, err, out, print_json, print_table, progress_bars
from ..runtime.terminal.options import (
    BundleArgument,
    Device,
    Json,
    Level,
    VariantName,
    at_most_cores,
    comma_separated,
    option,
    takes_options,
)

if TYPE_CHECKING:
    from ..runtime.decode.config import Masks
    from .bench import BenchReport

T = TypeVar("T")
app = typer.Typer()
# Panels of --help
ROWS = "Rows and scores"
RUN = "The run"
SETTINGS = "Settings to compare"


TASK = option(ROWS, "A JSONL file of rows, or a built-in task: assistant, arithmetic.", "--task", "-t")
MostRows = Annotated[int | None, option(ROWS, "Use at most this many rows.", min=1)]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The options of a command over the rows of a task: those of a TaskRequest.

    Rows and scores:
    score: Score of rows that name none: a known one, or your own as module:function.
    schema: A JSON schema for the answers of rows without a form of their own; `assistant`: the built-in
        schema of its 25 tools.
    """

    score: str | None = None
    schema: Annotated[str | None, typer.Option(metavar="FILE")] = None
    device: Device = "cpu"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            callback=at_most_cores,
            help="Compute threads; the backend decides by default. Here -t is the task.",
        ),
    ] = None
    accuracy_level: Level = None


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Where the report and the state of a calibration are kept.

    The run:
    output: Folder of the report and the state; by default named after task and bundle.
    resume: Continue an earlier run from its state in the output folder.
    force: Discard the state of an earlier run.
    """

    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    resume: bool = False
    force: bool = False


@app.command()
@takes_options
def calibrate(
    bundle: BundleArgument,
    task: Annotated[str, TASK],
    max_drop: Annotated[
        float,
        typer.Option(
            help="The largest acceptable mean quality loss against tau 1; 0.02 means two percentage points."
        ),
    ] = 0.02,
    confidence: Annotated[float, typer.Option(help="Confidence level of the quality bound.")] = 0.95,
    name: Annotated[str | None, typer.Option(help="Name of the profile; by default the task's.")] = None,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Whether to store the profile in the bundle.")
    ] = True,
    compare: Annotated[
        str, option(SETTINGS, "Confidence metrics to try, separated by commas; they share the error.")
    ] = "probability",
    taus: Annotated[
        str | None, option(SETTINGS, "Candidates of the only metric, from safe to fast, separated by commas.")
    ] = None,
    batch: Annotated[int, option(SETTINGS, "Rows decoded together.", min=1)] = 1,
    limit: MostRows = None,
    guarantee: Annotated[
        bool,
        typer.Option(
            "--guarantee/--no-guarantee",
            help="Whether the bound is shown for all requests, or only the mean drop of these rows counts.",
        ),
    ] = True,
    *,
    options: TaskOptions,
    state: StateOptions,
    as_json: Json = False,
) -> None:
    """Find the fastest tau that keeps the quality of a task, with a guarantee; compare it with exact mode,
    and store it in the bundle as a profile."""
    from .tau.options import CalibrationOptions
    from .tau.report import COLUMNS
    from .tau.run import PAGE_FILE, CalibrationRequest, run

    candidates = numbers("--taus", taus, float)
    goal = CalibrationOptions(
        max_drop, confidence, comma_separated(compare), candidates, limit, batch, guarantee
    )
    request = CalibrationRequest(
        bundle, task, **asdict(options), **asdict(state), name=name, store=store, options=goal
    )
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
    if report.calibration.exact.suffices:
        out.print(f"try: mars-export generate {bundle} -p ... (exact mode, the default)", markup=False)
    elif store:
        out.print(f"try: mars-export generate {bundle} --profile {request.profile_name} -p ...", markup=False)


@app.command()
@takes_options
def bench(
    bundle: BundleArgument,
    task: Annotated[str, TASK] = "assistant",
    tau: Annotated[
        str | None,
        option(
            SETTINGS,
            "Taus to compare with one-token mode, separated by commas: by default 0.95, and none for a bundle"
            " without masks.",
        ),
    ] = None,
    exact: Annotated[
        bool, option(SETTINGS, "Whether to compare exact mode, too.", "--exact/--no-exact")
    ] = True,
    batch: Annotated[str, option(SETTINGS, "Rows decoded at once, separated by commas.")] = "1",
    masks: Annotated[
        str,
        option(
            SETTINGS,
            "Most predictions of a step, separated by commas: auto (step by step), full, or numbers.",
        ),
    ] = "auto",
    limit: Annotated[
        int | None,
        option(ROWS, "Use at most this many rows: by default 16, or four times the largest batch."),
    ] = None,
    rounds: Annotated[int, option(RUN, "How often each setting decodes the rows.")] = 3,
    variant: VariantName = None,
    *,
    options: TaskOptions,
    as_json: Json = False,
) -> None:
    """Compare one-token mode, exact mode and taus on the rows of a task: speed, latency and quality."""
    from ..runtime.bundle.open import open_bundle
    from .bench import BenchRequest
    from .bench import bench as measure
    from .laps import BenchOptions

    manifest = open_bundle(bundle).manifest
    if tau is None:
        tau = "" if manifest.tokens.mask is None else "0.95"
    comparison = BenchOptions(
        taus=numbers("--tau", tau, float), batches=numbers("--batch", batch, int), masks=_masks(masks),
        rounds=rounds, limit=limit, exact=exact,
    )  # fmt: skip
    request = BenchRequest(bundle, task, **asdict(options), variant=variant, options=comparison)
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
            f"stopped; finished work is kept in {folder}: continue with the same command and --resume",
            markup=False,
        )
        raise typer.Exit(getattr(stop, "code", 130)) from None


def numbers(name: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    """The numbers of an option, separated by commas. Raises MarsError for other values."""
    try:
        return tuple(kind(word) for word in comma_separated(text or ""))
    except ValueError as error:
        kinds = "whole numbers" if kind is int else "numbers"
        raise MarsError(f"{name} must be {kinds} separated by commas, not {text!r}") from error


def _masks(text: str) -> tuple[Masks, ...]:
    """The values of --masks. BenchOptions checks them."""
    return tuple(int(word) if word.isdecimal() else word for word in comma_separated(text))  # type: ignore[misc]


def _print_bench(report: BenchReport) -> None:
    out.print(report.headline, style="bold", markup=False)
    tables = {
        "whole answers; speed-up with its lowest and highest round; score with its interval": (
            report.speed_table
        ),
        "latency of a reader, ms: median and 99th percentile": report.latency_table,
        "a service with a full batch": report.load_table,
    }
    for title, (head, *lines) in tables.items():
        out.print(f"\n{title}", style="dim", markup=False)
        print_table(head, lines, of_numbers=True)
    out.print()
    for line in report.facts:
        out.print(line, markup=False)
