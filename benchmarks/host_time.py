"""What a decode step costs outside ONNX Runtime, in Python and in C++, side by side.

    python benchmarks/host_time.py BUNDLE [--program build/cpp/release/tests/mars-host-time] [--threads 2] [--tokens 64] [--rounds 5] [--json FILE]

Rounds are interleaved: each decodes one answer at tau 1 (one slot a step) after a prompt of 128 tokens, in Python and by the C++ program
that `make cpp` builds. Of every step the time inside ONNX Runtime's run is taken off. Medians over the steps of all rounds, wall clock.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from statistics import median
from time import perf_counter

from mars_export.runtime import GenerationConfig, Session

PROMPT = [1 + i % 200 for i in range(128)]
PROGRAM = Path(__file__).resolve().parent.parent / "build" / "cpp" / "release" / "tests" / "mars-host-time"
Steps = list[tuple[float, float]]
"""(microseconds outside ONNX Runtime, microseconds in all) of each step."""


class Clocked:
    """An ONNX Runtime session whose runs are timed."""

    def __init__(self, session: object) -> None:
        self._session, self.inside = session, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: object) -> None:
        begun = perf_counter()
        self._session.run_with_iobinding(binding)  # type: ignore[attr-defined]
        self.inside += perf_counter() - begun


def in_python(session: Session, clocked: Clocked, tokens: int) -> Steps:
    stream = iter(session.stream(PROMPT, GenerationConfig(tau=1.0, max_new_tokens=tokens, eos_ids=())))
    next(stream)  # the prompt
    found: Steps = []
    while True:
        inside, begun = clocked.inside, perf_counter()
        if next(stream, None) is None:
            return found
        whole = perf_counter() - begun
        found.append((1e6 * (whole - (clocked.inside - inside)), 1e6 * whole))


def in_cpp(program: Path, bundle: Path, threads: int, tokens: int) -> Steps:
    done = subprocess.run(
        [program, bundle, str(threads), str(tokens)], capture_output=True, text=True, check=True
    )
    return [
        (float(outside), float(whole))
        for outside, whole in (line.split() for line in done.stdout.splitlines())
    ]


def summary(steps: Steps) -> dict[str, float]:
    outside, whole = median(s[0] for s in steps), median(s[1] for s in steps)
    share = median(s[0] / s[1] for s in steps)
    return {
        "steps": len(steps),
        "outside_us": round(outside, 1),
        "whole_us": round(whole, 1),
        "share": round(share, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--program", type=Path, default=PROGRAM)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.program.is_file():
        parser.error(f"{args.program} is not there: `make cpp` builds it")
    session = Session.open(args.bundle, threads=args.threads)
    backend: object = session.backend
    clocked = backend._session = Clocked(backend._session)  # type: ignore[attr-defined]
    made: dict[str, Steps] = {"Python": [], "C++": []}
    in_python(session, clocked, 8)
    for _ in range(args.rounds):
        made["Python"] += in_python(session, clocked, args.tokens)
        made["C++"] += in_cpp(args.program, args.bundle, args.threads, args.tokens)
    found = {language: summary(steps) for language, steps in made.items()}
    for language, line in found.items():
        print(
            f"{language:7} {line['outside_us']:7.1f} us of {line['whole_us'] / 1000:6.2f} ms outside ONNX Runtime: {100 * line['share']:.2f} %"
        )
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {"bundle": args.bundle.name, "threads": args.threads, "tokens": args.tokens, **found},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
