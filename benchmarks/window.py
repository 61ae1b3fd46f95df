"""The adaptive window beside fixed ones: the same rows decoded with each, in interleaved rounds, by wall clock.

    python benchmarks/window.py BUNDLE [--threads 2] [--rows 6] [--rounds 3] [--taus 0.95 0.8] [--json FILE]

Rows are the first of the default checkpoint's test data, one at a time. A task's figure is the sum over its rows of the least decoding
time of the rounds (the prompt and its first step left out) per generated token after the first step; ratios compare `auto` with the best
fixed window and with one-token mode.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mars_export.calibration.tasks.tasks import Task, load
from mars_export.runtime import GenerationConfig, Session

DATA = Path(__file__).parent.parent / "examples" / "default-checkpoint" / "data"
TASKS = ("assistant", "arithmetic", "chat")
FIXED = (1, 2, 3, 4, 6, 8)
Setting = int | None  # a fixed window, None for auto


def decoded(session: Session, task: Task, tau: float, window: Setting) -> tuple[int, float]:
    """Tokens after the first step, and the seconds for them."""
    stats = session.generate(
        task.prompt, GenerationConfig(tau=tau, max_new_tokens=task.max_new_tokens, window=window)
    ).stats
    return stats.tokens_after_first, stats.decode_time


def compared(session: Session, rows: list[Task], tau: float, rounds: int) -> dict[str, float]:
    """Milliseconds a token for each setting; `one token` is window 1, which feeds no masks."""
    settings: tuple[Setting, ...] = (*FIXED, None)
    least: dict[tuple[int, Setting], tuple[int, float]] = {}
    for _ in range(rounds):
        for i, row in enumerate(rows):
            for setting in settings:
                tokens, seconds = decoded(session, row, tau, setting)
                before = least.get((i, setting))
                least[i, setting] = (tokens, min(seconds, before[1]) if before else seconds)
    made = {}
    for setting in settings:
        measured = [least[i, setting] for i in range(len(rows))]
        made[str(setting or "auto")] = (
            1000 * sum(s for _, s in measured) / max(1, sum(t for t, _ in measured))
        )
    return made


def judged(task: str, tau: float, times: dict[str, float]) -> dict[str, Any]:
    """`times` beside the best fixed window and one token; prints the ratios."""
    best = min(FIXED, key=lambda window: times[str(window)])
    against_best, against_one = times[str(best)] / times["auto"], times["1"] / times["auto"]
    cells = "  ".join(f"{window} {ms:.1f}" for window, ms in times.items())
    print(
        f"{task:10} tau {tau:<4}  ms/token: {cells}  auto is {against_best:.3f} x the best ({best}), {against_one:.3f} x one token",
        flush=True,
    )
    return {
        "task": task,
        "tau": tau,
        "ms_per_token": times,
        "best": best,
        "speed_of_best": against_best,
        "speed_of_one": against_one,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--taus", type=float, nargs="+", default=[0.95, 0.8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    session = Session.open(args.bundle, threads=args.threads)
    costs = [[positions, round(seconds * 1000, 2)] for positions, seconds in session.cost.points]
    print("cost of a step, ms by positions:", "  ".join(f"{p}: {ms:g}" for p, ms in costs))
    results = []
    for name in TASKS:
        rows = list(load(DATA / f"{name}.test.jsonl"))[: args.rows]
        decoded(session, rows[0], 0.95, None)  # warm up
        for tau in args.taus:
            results.append(judged(name, tau, compared(session, rows, tau, args.rounds)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        values = {
            "bundle": args.bundle.name,
            "threads": args.threads,
            "rows": args.rows,
            "rounds": args.rounds,
            "cost_ms": costs,
            "results": results,
        }
        args.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
