"""The adaptive window without a clock: recorded predictions, a measured cost table, and nothing that drifts.

    python benchmarks/window_replay.py BUNDLE [BUNDLE ...] [--rows 20] [--threads 2] [--taus 0.95 0.8] [--json FILE]

For each bundle the record pass of calibration keeps what every mask of every step predicted on the first rows of the default checkpoint's
test data. Any policy can then be replayed exactly: which runs it would have accepted, and by the session's cost table what its steps would
have cost, in milliseconds a token after the first step. What this leaves out: a cost table is only an estimate of a step (window.py times
real decoding), and a run that is accepted at tau < 1 may continue otherwise than the recorded answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from window import DATA, FIXED, TASKS, judged

from mars_export.calibration.tasks.tasks import load
from mars_export.calibration.tau.record import Trace, record
from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.decode.cost import Cost
from mars_export.runtime.decode.policy import Policy
from mars_export.runtime.decode.row import Row


def milliseconds(trace: Trace, cost: Cost, tau: float, window: int | None) -> tuple[int, float]:
    """Tokens after the first step, and what their steps cost; `window` None is the adaptive one."""
    confidences, answer = trace.confidences["probability"], trace.outcome.token_ids
    row, policy = Row(0, [0], GenerationConfig(tau=tau, window=window), ()), Policy(lambda: cost)
    position = tokens = 0
    seconds = 0.0
    while position < len(answer):
        passed = [c >= tau for c in confidences[position]]
        most = len(passed) - 1
        if position:
            [masks] = policy.masks([row], [most if window is None else min(most, window - 1)])
        else:
            masks = most if window is None else min(most, window - 1)
        run = 1 + next((k for k in range(masks) if not passed[k + 1]), masks)
        run = min(run, len(answer) - position)
        if position:
            seconds += cost.of(row.num_pending + masks)
            tokens += run
        row.pass_rates.saw(run, passed[: masks + 1])
        row.cursor = len(row.tokens)
        row.tokens += answer[position : position + run]
        position += run
    return tokens, 1000 * seconds


def replayed(traces: list[Trace], cost: Cost, tau: float) -> dict[str, float]:
    """Milliseconds a token for each fixed window and `auto`."""
    made = {}
    for window in (*FIXED, None):
        each = [milliseconds(trace, cost, tau, window) for trace in traces]
        made[str(window or "auto")] = sum(ms for _, ms in each) / max(1, sum(tokens for tokens, _ in each))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--taus", type=float, nargs="+", default=[0.95, 0.8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for bundle in args.bundles:
        session = Session.open(bundle, threads=args.threads)
        cost = session.cost
        print(bundle.name)
        for name in TASKS:
            traces = list(record(session, list(load(DATA / f"{name}.test.jsonl"))[: args.rows], batch=4))
            for tau in args.taus:
                results.append({"bundle": bundle.name, **judged(name, tau, replayed(traces, cost, tau))})
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"rows": args.rows, "threads": args.threads, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
