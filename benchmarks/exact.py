"""Exact mode on the held-out rows of the default checkpoint: the same text as one token a step, and in how
many forwards.

    python benchmarks/exact.py BUNDLE [--tasks assistant arithmetic chat] [--rows N] [--batch 1]
                               [--masks auto] [--threads 2] [--state exact.jsonl] [--json FILE]

Every row is answered at tau 1 and in exact mode, eight rows side by side at tau 1 (its text is what counts)
and `--batch` in exact mode. Rows that are in the state file are not answered again. Where two texts differ,
and the bundle was exported with --metrics, the margin of the two best tokens at the first difference says how
near a tie it was. Speed is measured by benchmarks/steps.py and peers.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks.tasks import TaskRow, load

DATA = Path(__file__).parent.parent / "examples" / "default-checkpoint" / "data"
TASKS = ("assistant", "arithmetic", "chat")
PIECE = 16  # rows that are answered between two lines of the state


def margin(session: Session, prompt: list[int]) -> float | None:
    """Lead of the best next token over the second, in probability."""
    if "margin" not in session.backend.outputs:
        return None
    config = GenerationConfig(tau=1.0, metric="margin", max_new_tokens=1)
    return session.generate(prompt, config).confidences[0]


def compared(
    session: Session, name: str, rows: list[TaskRow], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    prompts = [session.encode(row.prompt) for row in rows]
    one = [GenerationConfig(tau=1.0, max_new_tokens=row.max_new_tokens) for row in rows]
    masks = int(args.masks) if args.masks.isdecimal() else args.masks
    exact = [GenerationConfig(max_new_tokens=row.max_new_tokens, masks=masks) for row in rows]
    expected = list(session.generate_each(prompts, one, batch=8))
    answers = list(session.generate_each(prompts, exact, batch=args.batch))
    for prompt, left, right in zip(prompts, expected, answers, strict=True):
        values: dict[str, Any] = {
            "task": name,
            "tokens": right.stats.tokens,
            "forwards": right.stats.forwards,
        }
        values |= {
            "draft_tokens": right.stats.draft_tokens,
            "accepted_draft_tokens": right.stats.accepted_draft_tokens,
        }
        values["same"] = left.token_ids == right.token_ids
        if not values["same"]:
            pairs = zip(left.token_ids, right.token_ids, strict=False)
            shorter = min(len(left.token_ids), len(right.token_ids))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            values |= {"differs_at": at, "margin": margin(session, [*prompt, *left.token_ids[:at]])}
        yield values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--masks", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, default=Path("exact.jsonl"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in TASKS}
    if args.state.exists():
        for line in args.state.read_text().splitlines():
            done[json.loads(line)["task"]].append(json.loads(line))
    for name in args.tasks:
        rows = list(load(DATA / f"{name}.test.jsonl"))[: args.rows]
        for start in range(len(done[name]), len(rows), PIECE):
            values = list(compared(session, name, rows[start : start + PIECE], args))
            done[name] += values
            with args.state.open("a") as file:
                file.writelines(json.dumps(v) + "\n" for v in values)
    table = {name: summary(done[name]) for name in args.tasks if done[name]}
    for name, values in table.items():
        print(
            f"{name}: {values['same']} of {values['rows']} texts the same, "
            f"{values['tokens_per_forward']:.2f} tokens/forward,"
            f" {values['accepted_draft_tokens']} of {values['draft_tokens']} draft tokens held"
        )
        for row in values["differences"]:
            print(
                f"  differs at token {row['differs_at']}, where the margin of the two best is {row['margin']}"
            )
    if args.json:
        args.json.write_text(
            json.dumps({"bundle": args.bundle.name, "batch": args.batch, **table}, indent=2) + "\n"
        )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total = {
        key: sum(row[key] for row in rows)
        for key in ("same", "tokens", "forwards", "draft_tokens", "accepted_draft_tokens")
    }
    different = [{k: row[k] for k in ("differs_at", "margin")} for row in rows if not row["same"]]
    per_forward = total["tokens"] / total["forwards"]
    return {"rows": len(rows), **total, "tokens_per_forward": round(per_forward, 3), "differences": different}


if __name__ == "__main__":
    main()
