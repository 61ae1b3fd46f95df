"""The plan: the record pass of a task and this machine's cost of a step, then what each kind of replica would
do with the arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...runtime import Session
from ...runtime.decode.cost import Cost, measure
from ...runtime.decode.schedule import Limits
from ...runtime.errors import CalibrationError
from ..rounds import Progress, busy_note, machine_load
from ..rows import Plan, TaskRequest, make_plan
from ..tau.record import Trace, record
from . import arrivals
from .fleet import BALANCES, Fleet, Machine
from .options import PlanOptions, modes_of
from .search import Offer, offer
from .work import Mode, Work, work_of

SCHEMA = 1
RECORD_BATCH = 8
ASSUMED = (
    "every replica is a machine like this one, with the same threads and nothing else to do",
    "requests are like the rows of the task, each prompt read from its beginning (a saved prefix only helps)",
    "nobody hangs up, nothing fails, and the queue is as long as it gets (serve has --max-waiting)",
    "the network's time is not in it",
    "prompts are read in the order in which they come (the runtime lets short ones pass long ones)",
    "a feed is chosen for each number of rows, by the whole task (the runtime chooses at every step)",
)


@dataclass(frozen=True, slots=True)
class PlanRequest(TaskRequest):
    """What `mars-export plan` is asked for. What an earlier plan recorded is used."""

    prefix = "plan"
    kind = "plan"
    resume: bool = True
    options: PlanOptions = field(default_factory=lambda: PlanOptions(p95=1.0, rate=1.0))


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Offers of each mode and batch, and the one to take: the fewest replicas, exact mode before a tau, then
    the smaller p95. `slower` is how much longer the record pass took than its steps cost."""

    task: str
    machine: str
    options: PlanOptions
    offers: tuple[Offer, ...]
    num_rows: int
    prompt_tokens: float
    answer_tokens: float
    cost: tuple[tuple[int, float], ...]
    slower: float
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Offer | None:
        good = [o for o in self.offers if o.keeps and o.replicas is not None]
        return min(good, key=lambda o: (o.replicas, o.mode != "exact", o.p95), default=None)

    @property
    def headline(self) -> str:
        found, p95 = self.chosen, f"p95 of {self.options.p95:g} s"
        if found is None:
            given = self.options.replicas
            return f"{_replicas(given)} cannot keep a {p95}" if given else f"nothing here keeps a {p95}"
        kind = f"{_replicas(found.replicas)} of {found.batch} rows, {found.mode}"
        return f"{kind}: p95 {found.p95:.3g} s keeps a {p95}"

    @property
    def reason(self) -> str:
        """Why it is what it is, in a sentence."""
        found = self.chosen
        if found is None:
            best = min(self.offers, key=lambda o: (o.alone, -o.capacity))
            return (
                f"{best.mode} at batch {best.batch} comes closest ({best.why or 'see its p95'}); a faster"
                " mode (--modes), shorter answers or a faster machine are what is left"
            )
        others = [o for o in self.offers if o.keeps and o.mode != found.mode]
        next_best = min(others, key=lambda o: (o.replicas or 0, o.p95), default=None)
        words = f"one of them alone answers {found.capacity:.3g} requests/s and is {found.busy:.0%} busy"
        if next_best is not None:
            words += f"; {next_best.mode} takes {next_best.replicas} (batch {next_best.batch})"
        return words

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (*ASSUMED, BALANCES[self.options.balance])

    @property
    def facts(self) -> list[str]:
        source = (
            f"{self.options.rate:g} requests/s by Poisson's law"
            if self.options.trace is None
            else f"arrivals of {self.options.trace.name}"
        )
        rows = (
            f"{self.num_rows} rows of {self.task}: {self.prompt_tokens:.0f} prompt tokens and"
            f" {self.answer_tokens:.0f} of the answer in the mean"
        )
        return [source, rows, f"{self.machine}; steps cost {self.slower:.2f} times their table", *self.notes]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Lines by COLUMNS."""
        return [
            (
                o.mode,
                str(o.batch),
                "-" if o.replicas is None else str(o.replicas),
                *("-" if v is None else f"{v:.3g}" for v in (o.p50, o.p95, o.p99, o.first)),
                "-" if o.busy is None else f"{o.busy:.0%}",
                f"{o.capacity:.3g}",
                f"{o.alone:.3g}",
                "<-" if o == self.chosen else o.why or ("" if o.keeps else "too slow"),
            )
            for o in self.offers
        ]

    def to_dict(self) -> dict[str, Any]:
        options = asdict(self.options)
        options["trace"] = self.options.trace.name if self.options.trace is not None else None
        return {
            "schema": SCHEMA,
            "headline": self.headline,
            "reason": self.reason,
            "chosen": asdict(self.chosen) if self.chosen is not None else None,
            "offers": [asdict(o) for o in self.offers],
            "task": self.task,
            "machine": self.machine,
            "options": options,
            "num_rows": self.num_rows,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "cost": [list(point) for point in self.cost],
            "slower": self.slower,
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }


COLUMNS = (
    "mode", "batch", "replicas", "p50 s", "p95 s", "p99 s", "first p95 s", "busy", "requests/s each",
    "alone p95 s", "",
)  # fmt: skip


def _replicas(count: int | None) -> str:
    return f"{count} replica{'s' if count != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Basis:
    """What is measured once, whatever the load: the rows that were recorded, a step's cost and `slower`."""

    plan: Plan
    traces: tuple[Trace, ...]
    cost: Cost
    slower: float
    notes: tuple[str, ...]

    def works(self, session: Session, mode: Mode) -> list[Work]:
        eos = session.bundle.manifest.tokens.eos
        pairs = zip(self.plan.tasks, self.traces, strict=True)
        return [work_of(trace, mode, eos, task.max_new_tokens) for task, trace in pairs]

    def fleet(self, session: Session, mode: Mode, batch: int, prefill_tokens: int) -> Fleet:
        block = session.bundle.manifest.block
        machine = Machine(self.cost, block, batch, prefill_tokens, self.slower)
        return Fleet(machine, mode, self.works(session, mode))


def plan(request: PlanRequest, progress: Progress | None = None) -> PlanReport:
    """Record what is not recorded yet, and simulate. Raises CalibrationError for a task, modes or a trace
    that do not allow it, before anything is decoded."""
    options, report = request.options, progress or (lambda phase, done, total: None)
    times = arrivals.read(options.trace) if options.trace is not None else None
    tasks, session = request.rows(), request.open()
    modes = modes_of(session, options.modes)
    rows = make_plan(session, tasks, options.limit)
    if any(task.form for task in rows.tasks):
        raise CalibrationError(
            "rows with a schema, regex, choice or tools cannot be planned for yet: what a grammar forces"
            " costs no step; leave those fields out of the rows"
        )
    basis = recorded(request, session, rows, report)
    kinds = [(mode, batch) for mode in modes for batch in dict.fromkeys(options.batches)]
    offers: list[Offer] = []
    for mode, batch in kinds:
        report("simulate", len(offers), len(kinds))
        offers.append(offer(basis.fleet(session, mode, batch, options.prefill_tokens), options, times))
    report("simulate", len(offers), len(kinds))
    return PlanReport(
        request.task_name,
        request.machine,
        options,
        tuple(offers),
        len(basis.traces),
        sum(t.prompt_tokens for t in basis.traces) / len(basis.traces),
        sum(len(t.outcome.token_ids) for t in basis.traces) / len(basis.traces),
        basis.cost.points,
        basis.slower,
        basis.notes,
    )


def recorded(request: PlanRequest, session: Session, rows: Plan, report: Progress) -> Basis:
    """The record pass, as far as it is not in the journal, and the cost table, wide enough for a batch."""
    load = machine_load()
    where = {"device": request.device, "threads": request.threads, "batch": RECORD_BATCH}
    journal = request.journal(session, where)
    try:
        keys = [f"record/{task.digest[:24]}" for task in rows.tasks]
        missing = {key: task for key, task in zip(keys, rows.tasks, strict=True) if key not in journal}
        report("record", len(keys) - len(missing), len(keys))
        if missing:
            cost = _wide(session, max(request.options.prefill_tokens, 64))
            journal["cost"] = cost.points
            made = record(session, list(missing.values()), RECORD_BATCH)
            for done, (key, trace) in enumerate(zip(missing, made, strict=True), start=1):
                journal[key] = trace
                report("record", len(keys) - len(missing) + done, len(keys))
        cost = Cost(tuple((int(p), float(s)) for p, s in journal["cost"]))
        traces = tuple(journal.read(key, Trace) for key in keys)
    finally:
        journal.close()
    slower = _slower(traces, cost, session.bundle.manifest.block)
    notes = [note] if (note := busy_note(load)) else []
    if rows.too_long:
        notes.append(f"{len(rows.too_long)} rows are left out as too long")
    return Basis(rows, traces, cost, slower, tuple(notes))


def _wide(session: Session, prefill_tokens: int) -> Cost:
    """The session's table, and behind it steps as large as a piece of a prompt with its masks."""
    manifest = session.bundle.manifest
    own = session.cost.points
    largest = prefill_tokens + 2 * manifest.block
    wide = measure(session.backend, manifest.block, manifest.tokens.mask, largest=largest)
    return Cost((*own, *(point for point in wide.points if point[0] > own[-1][0])))


def _slower(traces: Sequence[Trace], cost: Cost, block: int) -> float:
    """How much longer the record pass took than its steps cost by the table; at least 1."""
    took = sum(trace.outcome.seconds for trace in traces)
    width = Mode("record", False, 0.0)  # full windows, of which one token is accepted
    works = [Work(t.prompt_tokens, (1,) * len(t.outcome.token_ids), len(t.outcome.token_ids)) for t in traces]
    machine = Machine(cost, block, RECORD_BATCH, Limits.of_rows(RECORD_BATCH).prefill_tokens)
    fleet = Fleet.with_shape(machine, width, works)
    seconds = fleet.run([0.0] * len(works), range(len(works)), 1).seconds
    return max(1.0, took / seconds)
