"""Whether the planner still chooses well after a busy time: `auto` beside `masks full` and one token.

    python benchmarks/noise.py BUNDLE [--busy 2] [--answers 12] [--rounds 5] [--threads 2] [--json FILE]

One session gives `--answers` answers of the assistant task while `--busy` processes compute beside it. They
end; the session gives three more answers, and is then measured beside a second session with `masks full`,
which answers the same rows in turn with it. Afterwards the first session answers the chat task in exact mode
and one token a step, in turn. Results are medians of the ratios within a round; 1.00 is the other's speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks.tasks import load

DATA = Path(__file__).parent.parent / "examples" / "default-checkpoint" / "data"


def answer(session: Session, row: Any, **settings: Any) -> tuple[float, float]:
    """Tokens/s and tokens/forward of one answer."""
    config = GenerationConfig(max_new_tokens=row.max_new_tokens, **settings)
    begun = perf_counter()
    stats = session.generate(row.prompt, config).stats
    return stats.tokens / (perf_counter() - begun), stats.tokens / stats.forwards


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tasks = {task: load(DATA / f"{task}.test.jsonl") for task in ("assistant", "chat")}
    auto, full = (Session.open(args.bundle, threads=args.threads, cache_bytes=0) for _ in range(2))
    answer(full, tasks["assistant"][0], masks="full")

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        disturbed = [answer(auto, row) for row in tasks["assistant"][: args.answers]]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    first = [answer(auto, row) for row in tasks["assistant"][args.answers : args.answers + 3]]

    ratios: dict[str, list[float]] = {"auto / masks full": [], "exact / one token, chat": []}
    forwards: dict[str, list[float]] = {"auto": [], "masks full": []}
    for _ in range(args.rounds):
        for row in tasks["assistant"][-args.rows :]:
            (speed, width), (base, base_width) = answer(auto, row), answer(full, row, masks="full")
            ratios["auto / masks full"].append(speed / base)
            forwards["auto"].append(width)
            forwards["masks full"].append(base_width)
        for row in tasks["chat"][: args.rows]:
            ratios["exact / one token, chat"].append(answer(auto, row)[0] / answer(auto, row, tau=1.0)[0])
    result = {
        "busy": median(speed for speed, _ in disturbed),
        "first three": [speed for speed, _ in first],
        "tokens per forward": {name: median(values) for name, values in forwards.items()},
        **{name: median(values) for name, values in ratios.items()},
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
