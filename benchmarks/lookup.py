"""What prompt lookup gains on a stock checkpoint (`--no-masks`): exact mode with `lookup` beside one token.

    python benchmarks/lookup.py BUNDLE [--lookups 2 3] [--rows 12] [--rounds 2] [--threads 2]

Rows of the built-in tasks, and a conversation of an agent that repeats paths and ids: the history of each
turn has the earlier calls and their results. All settings answer a prompt before the next prompt.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks import tasks

DATA = Path(__file__).parent.parent / "examples" / "default-checkpoint" / "data"
SYSTEM = "You are a file agent. Answer with one JSON call: read_file, write_file, move_file or list_files."
FILES = ("projects/orchard/reports/2026-10-harvest-summary.md", "projects/orchard/data/trees-9f31c2ab77.csv")


def call(name: str, **arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'.replace("'", '"')


def agent_turns() -> list[list[dict[str, str]]]:
    """Prompts of a growing conversation, in which every answer repeats paths of the turns before."""
    talk = [{"role": "system", "content": SYSTEM}]
    listing = "\n".join(f"{path} owner=u-48213-beta" for path in FILES)
    asked = [
        ("List the files of the orchard project.", call("list_files", path="projects/orchard"), listing),
        (f"Read {FILES[0]}.", call("read_file", path=FILES[0]), "Harvest: 412 crates."),
        (f"Read {FILES[1]}.", call("read_file", path=FILES[1]), "id,kind\n9f31c2ab77,apple"),
        (
            f"Move {FILES[0]} to projects/orchard/archive.",
            call("move_file", path=FILES[0], to="projects/orchard/archive"),
            "moved",
        ),
    ]
    prompts = []
    for question, answer, result in [*asked, *asked[1:]]:
        talk.append({"role": "user", "content": question})
        prompts.append(list(talk))
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Result: {result}"}]
        talk.append({"role": "assistant", "content": "done"})
    return prompts[2:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--lookups", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    settings: dict[str, dict[str, Any]] = {"one token": {"tau": 1.0}}
    settings |= {f"lookup {n}": {"lookup": n} for n in args.lookups}
    settings |= {f"lookup {n}, window full": {"lookup": n, "window": "full"} for n in args.lookups}
    prompts = {"agent": [(session.encode(turn), 64) for turn in agent_turns()]}
    for name in ("assistant", "arithmetic", "chat"):
        rows = tasks.load(str(DATA / f"{name}.test.jsonl"))[: args.rows]
        prompts[name] = [(session.encode(row.prompt), row.max_new_tokens) for row in rows]
    print(f"{'task':12}{'setting':24}{'same text':>10}{'tokens/forward':>16}{'tokens/s':>10}")
    for task, rows_of_task in prompts.items():
        sums = defaultdict(lambda: [0, 0, 0, 0, 0.0])  # same, tokens, forwards, timed tokens, seconds
        for turn, (prompt, limit) in enumerate(rows_of_task * args.rounds):
            order = [*settings]
            order = [*order[turn % len(order) :], *order[: turn % len(order)]]
            answers = {
                name: session.generate(prompt, GenerationConfig(max_new_tokens=limit, **settings[name]))
                for name in order
            }
            for name, answer in answers.items():
                same, stats = answer.token_ids == answers["one token"].token_ids, answer.stats
                add = (same, stats.tokens, stats.forwards, stats.tokens_after_first, stats.decode_time)
                sums[name] = [a + b for a, b in zip(sums[name], add, strict=True)]
        for name in settings:
            same, tokens, forwards, timed, seconds = sums[name]
            print(
                f"{task:12}{name:24}{same:>10}{tokens / forwards:>16.2f}{timed / seconds:>10.1f}", flush=True
            )


if __name__ == "__main__":
    main()
