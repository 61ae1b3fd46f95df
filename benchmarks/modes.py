"""One token a step, tau 0.95 and exact mode side by side: tokens a second on the default checkpoint's
held-out rows, and how many texts of exact mode are those of one token a step.

    python benchmarks/modes.py BUNDLE [BUNDLE ...] [--tasks assistant arithmetic chat] [--batches 1 4 8 16]
                               [--rows 12] [--rounds 3] [--threads 2] [--device cpu] [--json FILE]

Every round answers the same rows in each mode, one mode after the other, so that other load on the machine
affects all modes. The results are medians over the rounds, and medians of the ratios within a round.
Times are wall clock of whole answers, prompts included. At a batch of 16 rows there are at least 16 of them.
"""

from __future__ import annotations

import argparse
import json
from operator import eq
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks.tasks import load

DATA = Path(__file__).parent.parent / "examples" / "default-checkpoint" / "data"
TASKS = ("assistant", "arithmetic", "chat")
MODES = {"one token": {"tau": 1.0}, "tau 0.95": {"tau": 0.95}, "exact": {"exact": True}}


def measured(session: Session, task: str, batch: int, num_rows: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds: each mode's tokens/s and tokens/forward, exact's ratios to the others; rows in
    which exact mode gave the tokens of one token a step.
    """
    rows = load(DATA / f"{task}.test.jsonl")[: max(num_rows, batch)]
    prompts = [session.encode(row.prompt) for row in rows]
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    forwards: dict[str, float] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for _ in range(rounds):
        for mode, settings in MODES.items():
            configs = [
                GenerationConfig(max_new_tokens=row.max_new_tokens).with_values(**settings) for row in rows
            ]
            begun = perf_counter()
            completions = list(session.generate_each(prompts, configs, batch=batch))
            seconds, stats = perf_counter() - begun, [done.stats for done in completions]
            tokens = sum(s.tokens for s in stats)
            speeds[mode].append(tokens / seconds)
            answers[mode] = [done.token_ids for done in completions]
            forwards[mode] = tokens / sum(s.forwards for s in stats)
    values: dict[str, Any] = {"task": task, "batch": batch, "rows": len(rows)}
    for mode in MODES:
        values[mode] = {"tokens_per_second": median(speeds[mode]), "tokens_per_forward": forwards[mode]}
    for other in ("one token", "tau 0.95"):
        pairs = zip(speeds["exact"], speeds[other], strict=True)
        values[f"exact / {other}"] = median(exact / base for exact, base in pairs)
    values["equal"] = f"{sum(map(eq, answers['exact'], answers['one token']))} of {len(rows)}"
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for path in args.bundles:
        threads = args.threads if args.device == "cpu" else None
        session = Session.open(path, args.device, threads=threads, cache_bytes=0)
        for task in args.tasks:
            session.generate(load(DATA / f"{task}.test.jsonl")[0].prompt, GenerationConfig(max_new_tokens=8))
            for batch in args.batches:
                values = {"bundle": path.name, **measured(session, task, batch, args.rows, args.rounds)}
                results.append(values)
                speeds = "  ".join(f"{mode} {values[mode]['tokens_per_second']:6.1f}" for mode in MODES)
                print(
                    f"{path.name} {task:10} batch {batch:2}  {speeds} tokens/s"
                    f"  exact is {values['exact / tau 0.95']:.2f} x tau 0.95,"
                    f" {values['exact / one token']:.2f} x one token, equal texts {values['equal']}",
                    flush=True,
                )
    if args.json:
        settings = {"device": args.device, "threads": args.threads, "rounds": args.rounds}
        args.json.write_text(json.dumps({**settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
