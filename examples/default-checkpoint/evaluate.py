"""Sweeps tau over the held-out test files through an exported bundle, with exact mode beside it; writes
JSON as it goes and prints a Markdown table.

A (task, tau) that is already in the output file is not decoded again, unless the bundle or the rows are
others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from mars_export import Completion, Session
from mars_export.calibration.tasks import tasks
from mars_export.calibration.tasks.scores import Output
from mars_export.calibration.tau.options import EXACT, setting

DATA = Path(__file__).parent / "data"
NAMES = ("assistant", "arithmetic", "chat")
FREE_WORDED = ("wide", "strangers")  # word problems in other words; test files only
EXACT_NAME = "exact"  # of the point that has no tau
TAUS = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


def point(
    session: Session,
    rows: Sequence[tasks.Task],
    tau: float | None,
    references: Sequence[str] | None,
    batch: int,
    tell: Callable[[int, int], None],
) -> tuple[dict[str, Any], list[str]]:
    """What the rows give and cost at one tau (None: in exact mode), and their outputs. `references` are the
    one-token outputs; at tau 1 the outputs are."""
    done: list[Completion] = []
    configs = [row.config(EXACT if tau is None else setting(tau)) for row in rows]
    start = perf_counter()
    for answer in session.generate_each([row.prompt for row in rows], configs, batch=batch):
        done.append(answer)
        tell(len(done), len(rows))
    timed, seconds = sum(len(answer.token_ids) for answer in done), perf_counter() - start
    if batch == 1:  # without the prompts and their first steps
        timed = sum(answer.stats.tokens_after_first for answer in done)
        seconds = sum(answer.stats.decode_time for answer in done)
    outputs = [outcome.text for outcome in done]
    expected = outputs if references is None else references
    pairs = list(zip(done, expected, strict=True))
    right = sum(
        row.score(
            Output(outcome.text, outcome.token_ids),
            Output(text, outcome.token_ids if references is None else ()),
        )
        for row, (outcome, text) in zip(rows, pairs, strict=True)
    )
    agreeing = sum(outcome.text == text for outcome, text in pairs)
    tokens, forwards = sum(len(o.token_ids) for o in done), sum(o.stats.forwards for o in done)
    return {
        "tau": tau,
        "num_rows": len(rows),
        "num_right": right,
        "num_agreeing": agreeing,
        "tokens": tokens,
        "forwards": forwards,
        "tokens_timed": timed,
        "seconds": seconds,
        "accuracy": right / len(rows),
        "agreement": agreeing / len(rows),
        "tokens_per_forward": tokens / forwards if forwards else 0.0,
        "tokens_per_second": timed / seconds if seconds > 0 else 0.0,
    }, outputs


def table(points: dict[str, dict[str, Any]]) -> str:
    """One Markdown table, a line per task and tau."""
    lines = [
        "| task | rows | tau | accuracy | same as tau 1 | tokens/forward | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, by_tau in points.items():
        # One token, exact mode, then the taus from safe to fast.
        for tau, p in sorted(by_tau.items(), key=lambda item: -float(item[0].replace(EXACT_NAME, "0.9999"))):
            accuracy = "-" if name == "chat" else f"{100 * p['accuracy']:.1f} %"
            lines.append(
                f"| {name} | {p['num_rows']} | {tau} | {accuracy} | {100 * p['agreement']:.1f} % | "
                f"{p['tokens_per_forward']:.2f} | {p['tokens_per_second']:.0f} |"
            )
    return "\n".join(lines)


def fingerprint(bundle: Path, rows: str, limit: int) -> str:
    """Changes with the bundle, the rows or their number."""
    return hashlib.sha256(
        (bundle / "manifest.json").read_bytes() + rows.encode() + str(limit).encode()
    ).hexdigest()[:16]


def save(path: Path, state: dict[str, Any]) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(state, indent=1) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("evaluation.json"))
    parser.add_argument("--split", choices=("test", "calibration"), default="test")
    parser.add_argument("--tasks", nargs="+", choices=NAMES + FREE_WORDED, default=list(NAMES))
    parser.add_argument("--taus", nargs="*", type=float, default=list(TAUS))
    parser.add_argument("--no-exact", action="store_true", help="leave exact mode out")
    parser.add_argument("--rows", type=int, default=10**6, help="only the first rows of each file")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    session = Session.open(args.bundle, device="cpu", threads=args.threads, cache_bytes=0)
    state: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.tasks:
        path = (
            tasks.find(name)
            if args.split == "calibration" and name != "chat"
            else DATA / f"{name}.{args.split}.jsonl"
        )
        rows = tasks.load(path)[: args.rows]
        mark = fingerprint(args.bundle, path.read_text(), len(rows)) + f"/{args.split}/batch {args.batch}"
        if state.get(name, {}).get("mark") != mark:
            state[name] = {"mark": mark, "points": {}, "references": None}
        entry = state[name]
        taus: list[float | None] = [*sorted({1.0, *args.taus}, reverse=True)]
        if not args.no_exact:
            taus.insert(1, None)
        for tau in taus:
            key = EXACT_NAME if tau is None else str(tau)
            if key in entry["points"]:
                continue

            def tell(done: int, total: int, name: str = name, key: str = key) -> None:
                print(f"\r{name} {key}: {done}/{total}", end="", file=sys.stderr, flush=True)

            is_reference = tau is not None and tau >= 1
            references = None if is_reference else entry["references"]
            entry["points"][key], outputs = point(session, rows, tau, references, args.batch, tell)
            print(file=sys.stderr)
            if is_reference:
                entry["references"] = outputs
            save(args.out, state)
    print(table({name: state[name]["points"] for name in args.tasks}))


if __name__ == "__main__":
    main()
