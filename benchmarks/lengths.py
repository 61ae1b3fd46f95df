"""How cost grows with the conversation: prompt tokens a second, and milliseconds a token after the prompt.

    python benchmarks/lengths.py BUNDLE... [--lengths 500 1000 2000 4000 7500] [--tokens 32] [--rounds 3]
                                 [--threads 2] [--json FILE] [--picture FILE.png]

One request at a time at tau 1, so that each token is a step of one slot, whatever the model says. Rounds
are interleaved over bundles and lengths. The result for prompts is the fastest round, for steps the median
over all rounds, with the smallest; on a busy machine read the CPU time of `--threads 1`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mars_export import GenerationConfig, MarsError, Session
from mars_export.calibration.drawing import COLORS, two_panels
from steps import Times

LENGTHS = (500, 1000, 2000, 4000, 7500)


@dataclass(slots=True)
class Cost:
    """What a prompt of some length cost, and the tokens behind it."""

    prompt: Times = field(default_factory=Times)
    step: Times = field(default_factory=Times)

    def summary(self, length: int) -> dict[str, float]:
        """Times in milliseconds."""
        return {
            "prompt_tokens_per_second": round(1000 * length / min(self.prompt.wall), 1),
            "prompt_tokens_per_cpu_second": round(1000 * length / min(self.prompt.cpu), 1),
            "ms_per_token": round(median(self.step.wall), 2),
            "smallest_ms_per_token": round(min(self.step.wall), 2),
            "smallest_cpu_ms_per_token": round(min(self.step.cpu), 2),
        }


def answer(session: Session, length: int, tokens: int, cost: Cost) -> None:
    """One request; `tokens` of the answer are timed, behind the first, which comes with the prompt."""
    config = GenerationConfig(tau=1.0, max_new_tokens=tokens + 1, eos_ids=())
    events = iter(session.stream([1 + i % 200 for i in range(length)], config))

    def prompt() -> None:
        while not next(events).token_ids:
            pass

    cost.prompt.measure(prompt)
    for _ in range(tokens):
        cost.step.measure(lambda: next(events))


def measured(args: argparse.Namespace) -> dict[str, dict[int, Cost]]:
    sessions = {path.name: Session.open(path, threads=args.threads, cache_bytes=0) for path in args.bundles}
    costs = {name: {length: Cost() for length in args.lengths} for name in sessions}
    for session in sessions.values():
        answer(session, min(args.lengths), 2, Cost())  # the first run of a session allocates
    for _ in range(args.rounds):
        for length in args.lengths:
            for name, session in sessions.items():
                answer(session, length, args.tokens, costs[name][length])
    return costs


def draw(figures: Mapping[str, Mapping[int, Mapping[str, float]]], picture: Path) -> None:
    panels = {"prompt_tokens_per_second": "Prompt, tokens a second", "ms_per_token": "Then, ms a token"}
    with two_panels(picture) as (_, *both):
        for axes, (figure, title) in zip(both, panels.items(), strict=True):
            for color, (name, by_length) in zip(COLORS, figures.items(), strict=False):
                y = [values[figure] for values in by_length.values()]
                axes.plot(
                    [*by_length], y, "o-", color=color, linewidth=1.5, label=name.removesuffix(".bundle")
                )
            axes.set_title(title)
            axes.set_xlabel("tokens of context")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        both[1].legend(frameon=False, fontsize=8.5, loc="lower right")


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("bundles", metavar="BUNDLE", type=Path, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    for option, default in (("tokens", 32), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    args = parser.parse_args(words)
    if len({path.name for path in args.bundles}) < len(args.bundles):
        parser.error("bundles are told apart by their names: two have the same one")
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = parsed(words)
    figures: dict[str, Any] = {
        name: {length: cost.summary(length) for length, cost in by_length.items()}
        for name, by_length in measured(args).items()
    }
    for name, by_length in figures.items():
        for length, values in by_length.items():
            print(
                "{name:24} {length:6}  prompt {prompt_tokens_per_second:7.0f} tokens/s"
                " ({prompt_tokens_per_cpu_second:.0f} a CPU second)  then {ms_per_token:6.2f} ms a token"
                " ({smallest_ms_per_token:.2f}, cpu {smallest_cpu_ms_per_token:.2f})".format(
                    name=name, length=length, **values
                )
            )
    if args.json:
        about = {"threads": args.threads, "rounds": args.rounds, "tokens": args.tokens, "bundles": figures}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if args.picture:
        draw(figures, args.picture)


if __name__ == "__main__":
    try:
        main()
    except MarsError as error:
        sys.exit(f"error: {error}")
