"""The command `plan`: its options, one call, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.console import (
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
from .task_command import AllowExec, Force, Score, TaskName, TaskThreads, numbers, progress_of

if TYPE_CHECKING:
    from .plan.plan import PlanReport

app = typer.Typer()


@app.command()
def plan(
    bundle: BundleArgument,
    p95: Annotated[
        float, typer.Option(help="Seconds within which 95 of 100 requests are to have their whole answer.")
    ],
    task: TaskName = "assistant",
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, which come by Poisson's law.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="File of arrivals instead: seconds, one number a line.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="What to choose from, with commas between: exact, one-token, tau=N, margin=N, entropy=N,"
            " profile=NAME; exact and the bundle's profiles by default."
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Rows that a replica runs at once, with commas between.")
    ] = "1,2,4,8",
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Say what so many do, instead of looking for the fewest.")
    ] = None,
    max_replicas: Annotated[int, typer.Option(min=1, help="The most to look among.")] = 100,
    balance: Annotated[
        str, typer.Option(help="Which replica a request goes to: random, turns, or least (busy).")
    ] = "random",
    requests: Annotated[int, typer.Option(min=100, help="Requests of each of three simulations.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Rows of the task to record, at most.")] = 48,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of what was recorded; named after task and bundle."),
    ] = None,
    score: Score = None,
    allow_exec: AllowExec = False,
    force: Force = False,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: TaskThreads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """How many replicas keep a latency: a simulation over what a step costs here and how many tokens its
    steps give on the rows of a task. Exit code 1 if nothing keeps it."""
    from .plan.options import PlanOptions
    from .plan.plan import PlanRequest
    from .plan.plan import plan as make_plan

    batches = numbers("--batch", batch, int)
    if (rate is None) == (trace is None):
        raise typer.BadParameter("give one of them", param_hint="--rate, --trace")
    options = PlanOptions(
        p95=p95, rate=rate, trace=trace, modes=listed(modes or ""), batches=batches, replicas=replicas,
        max_replicas=max_replicas, balance=balance, requests=requests, seed=seed, limit=limit,  # type: ignore[arg-type]
    )  # fmt: skip
    request = PlanRequest(
        bundle, task, output, score, allow_exec, device, threads, variant, accuracy_level, force=force,
        options=options,
    )  # fmt: skip
    with progress_of(request.folder, "recorded", resumes=False) as progress:
        report = make_plan(request, progress)
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report, bundle)
    if report.chosen is None:
        raise typer.Exit(1)


def _show(report: PlanReport, bundle: Path) -> None:
    from .plan.plan import COLUMNS

    out.print(report.headline, style="bold", markup=False)
    out.print(report.reason, markup=False)
    out.print()
    print_table(COLUMNS, report.table, of_numbers=True)
    out.print()
    for line in report.facts:
        out.print(line, markup=False)
    out.print("\nwhat is assumed", style="dim", markup=False)
    for line in report.assumptions:
        out.print(f"- {line}", markup=False)
    found = report.chosen
    if found is not None:
        out.print(f"\ntry: mars-export serve {bundle} --max-rows {found.batch}", markup=False)
