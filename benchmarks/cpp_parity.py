"""Whether libmars and the Python runtime give the same tokens on a real bundle, and what a step costs.

    python benchmarks/cpp_parity.py BUNDLE [--library build/cpp/release/libmars.so]
        [--assistant 100] [--arithmetic 50] [--modes exact 1 0.95 0.8]

Prompts are the first held-out test rows of the default checkpoint's data. Both runtimes use one thread
and all masks, and get the same token ids. A mode is `exact` or a tau.
Exit code 1 if any token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

from mars_export import GenerationConfig, Session

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.cabi import Library  # noqa: E402
from support.cabi_session import CSession  # noqa: E402

DATA = ROOT / "examples" / "default-checkpoint" / "data"


def prompts(session: Session, task: str, count: int) -> list[tuple[list[int], int]]:
    """Token ids and token limits of the first rows of a task."""
    with (DATA / f"{task}.test.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
    return [(session.encode(row["messages"]), row["max_new_tokens"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--library", type=Path, default=ROOT / "build" / "cpp" / "release" / "libmars.so")
    parser.add_argument("--assistant", type=int, default=100)
    parser.add_argument("--arithmetic", type=int, default=50)
    parser.add_argument("--modes", nargs="+", default=["exact", "1", "0.95", "0.8"])
    args = parser.parse_args()
    python = Session.open(args.bundle, threads=1, cache_bytes=0)
    different = 0
    with CSession(Library(args.library), args.bundle, threads=1) as twin:
        for task in ("assistant", "arithmetic"):
            rows = prompts(python, task, getattr(args, task))
            for mode in args.modes:
                tau = None if mode == "exact" else float(mode)
                equal = tokens = steps = 0
                seconds = {"python": 0.0, "c++": 0.0}
                for ids, limit in rows:
                    begun = perf_counter()
                    wanted = python.generate(
                        ids, GenerationConfig(tau=tau, max_new_tokens=limit, masks="full")
                    )
                    between = perf_counter()
                    made = twin.generate(ids, tau=tau, max_new_tokens=limit, masks="full")
                    seconds["python"] += between - begun
                    seconds["c++"] += perf_counter() - between
                    stats = wanted.stats
                    equal += (made.token_ids, made.forwards, made.accepted_draft_tokens) == (
                        wanted.token_ids,
                        stats.forwards,
                        stats.accepted_draft_tokens,
                    )
                    tokens += len(wanted.token_ids)
                    steps += stats.forwards
                different += len(rows) - equal
                times = ", ".join(
                    f"{name} {1000 * spent / max(steps, 1):.2f} ms/forward" for name, spent in seconds.items()
                )
                print(
                    f"{task} {mode}: {equal}/{len(rows)} answers equal, "
                    f"{tokens} tokens, {steps} forwards, {times}",
                    flush=True,
                )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
