"""The adaptive window beside fixed ones: by the clock, and replayed from recorded predictions."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks.tasks import Task, load
from mars_export.calibration.tau.record import Trace, record
from mars_export.runtime.decode.config import Window
from mars_export.runtime.decode.pace.cost import Cost
from mars_export.runtime.decode.pace.policy import Policy
from mars_export.runtime.decode.row import Row

DATA = Path(__file__).resolve().parent.parent / "examples" / "default-checkpoint" / "data"
TASKS = ("assistant", "arithmetic", "chat")
FIXED = (1, 2, 3, 4, 6, 8)  # windows; 1 feeds no masks
WINDOWS: tuple[Window, ...] = (*FIXED, "auto")


def window(args: argparse.Namespace) -> dict[str, Any]:
    """Rows are the first test rows, one at a time, each with its least time; the first step is left out."""
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    points = [[positions, round(seconds * 1000, 2)] for positions, seconds in session.cost.points]
    print("cost of a step, ms by positions:", "  ".join(f"{p}: {ms:g}" for p, ms in points))
    results = []
    for name in TASKS:
        rows = _rows(name, args.rows)
        _decoded(session, rows[0], 0.95, "auto")  # warm up
        for tau in args.taus:
            least: dict[tuple[int, Window], tuple[int, float]] = {}
            for _ in range(args.rounds):
                for i, row in enumerate(rows):
                    for size in WINDOWS:
                        tokens, seconds = _decoded(session, row, tau, size)
                        least[i, size] = (tokens, min(seconds, least.get((i, size), (0, seconds))[1]))
            times = {size: _per_token(least[i, size] for i in range(len(rows))) for size in WINDOWS}
            results.append(_judged(name, tau, times))
    return {"rows": args.rows, "cost_ms": points, "results": results}


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """No clock: what the record pass saw under every mask, and what each window's steps would have cost.

    A cost table is only an estimate of a step, and a run accepted at tau < 1 may continue otherwise than
    recorded.
    """
    results = []
    for bundle in args.bundles:
        session = Session.open(bundle, threads=args.threads, cache_bytes=0)
        print(bundle.name)
        for name in TASKS:
            traces = list(record(session, _rows(name, args.rows), batch=4))
            for tau in args.taus:
                times = {
                    size: _per_token(_replayed(trace, session.cost, tau, size) for trace in traces)
                    for size in WINDOWS
                }
                results.append({"bundle": bundle.name, **_judged(name, tau, times)})
    return {"rows": args.rows, "results": results}


def _rows(task: str, count: int) -> list[Task]:
    return list(load(DATA / f"{task}.test.jsonl"))[:count]


def _decoded(session: Session, task: Task, tau: float, size: Window) -> tuple[int, float]:
    """Tokens after the first step, and the seconds for them."""
    config = GenerationConfig(tau=tau, window=size, max_new_tokens=task.max_new_tokens)
    stats = session.generate(task.prompt, config).stats
    return stats.tokens_after_first, stats.decode_time


def _replayed(trace: Trace, cost: Cost, tau: float, size: Window) -> tuple[int, float]:
    """Tokens after the first step, and the seconds that their steps would have taken."""
    confidences, answer = trace.confidences["probability"], trace.outcome.token_ids
    row, policy = Row(0, [0], GenerationConfig(tau=tau, window=size), ()), Policy(lambda: cost)
    position = tokens = 0
    seconds = 0.0
    while position < len(answer):
        passed = [c >= tau for c in confidences[position]]
        most = min(len(passed), size) - 1 if isinstance(size, int) else len(passed) - 1
        [masks] = policy.masks([row], [most]) if position else [most]
        run = 1 + next((k for k in range(masks) if not passed[k + 1]), masks)
        run = min(run, len(answer) - position)
        if position:
            seconds += cost.of(row.num_pending + masks)
            tokens += run
        row.pass_rates.saw(run, passed[: masks + 1])
        row.cursor = len(row.tokens)
        row.tokens += answer[position : position + run]
        position += run
    return tokens, seconds


def _per_token(measured: Iterable[tuple[int, float]]) -> float:
    """Milliseconds a token."""
    counts, seconds = zip(*measured, strict=True)
    return 1000 * sum(seconds) / max(1, sum(counts))


def _judged(task: str, tau: float, times: Mapping[Window, float]) -> dict[str, Any]:
    """`times` beside the best fixed window and one token; prints the ratios."""
    best = min(FIXED, key=times.__getitem__)
    against_best, against_one = times[best] / times["auto"], times[1] / times["auto"]
    named = {str(size): ms for size, ms in times.items()}
    cells = "  ".join(f"{name} {ms:.1f}" for name, ms in named.items())
    said = f"auto is {against_best:.3f} x the best ({best}), {against_one:.3f} x one token"
    print(f"{task:10} tau {tau:<4}  ms/token: {cells}  {said}", flush=True)
    speeds = {"best": best, "speed_of_best": against_best, "speed_of_one": against_one}
    return {"task": task, "tau": tau, "ms_per_token": named, **speeds}
