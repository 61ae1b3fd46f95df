"""Measures the cost of decode steps and the effect of settings. Rounds are interleaved over all settings.

    python benchmarks/steps.py cost BUNDLE...        a step by its slots, opening a bundle
    python benchmarks/steps.py contexts BUNDLE...    prompts and steps by the length of their context
    python benchmarks/steps.py host BUNDLE           a step outside ONNX Runtime: Python, C++ (make cpp)

`BUNDLE@SET` opens a bundle with an instruction set of mars-export-kernels, such as avx2; `@0` without the
package. Each takes --threads, --rounds and --json FILE. Times are milliseconds, median (smallest); on a
busy machine read the CPU time of `--threads 1`, which other processes hardly change, and not the wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime

from mars_export import GenerationConfig, Session
from mars_export.runtime.decode.backend import Backend, StepInput
from mars_export.runtime.device.ort import kernels

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "build" / "cpp" / "release" / "tests" / "mars-host-time"
SLOTS = (1, 2, 4, 8, 15)
CURSOR = 128
PROMPTS, CURSORS, WIDTHS, PIECE = (128, 1000, 4000), (1000, 4000, 7500), (1, 8), 256  # of `contexts`
PROMPT = [100 + i % 200 for i in range(CURSOR)]  # without special tokens, which have low ids

Work = Callable[[], object]
Steps = list[tuple[float, float]]
"""(seconds outside ONNX Runtime, seconds in all) of each step."""


@dataclass(slots=True)
class Times:
    """Wall and CPU milliseconds of something done again and again."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, work: Work) -> None:
        wall, cpu = perf_counter(), process_time()
        work()
        self.wall.append(1000 * (perf_counter() - wall))
        self.cpu.append(1000 * (process_time() - cpu))

    def summary(self) -> dict[str, float]:
        found = {"median": median(self.wall), "smallest": min(self.wall), "smallest_cpu": min(self.cpu)}
        return {name: round(value, 3) for name, value in found.items()}

    def __str__(self) -> str:
        return "{median:.1f} ({smallest:.1f}, cpu {smallest_cpu:.1f})".format_map(self.summary())


def one_round(works: Mapping[Any, Work], times: Mapping[Any, Times]) -> None:
    """Each work once, because another's weights are in the processor's cache, and then with the clock."""
    for name, work in works.items():
        work()
        for _ in range(3):
            times[name].measure(work)


def opened(name: str, threads: int) -> Session:
    path, _, instructions = name.partition("@")
    os.environ.pop(kernels.VARIABLE, None)
    if instructions:
        os.environ[kernels.VARIABLE] = instructions
    return Session.open(Path(path), threads=threads, cache_bytes=0)


def step_of(backend: Backend, slots: int, rows: int = 1, capacity: int = 0, cursor: int = CURSOR) -> Work:
    cache = backend.new_cache(rows)
    cache.reserve(max(cursor + slots, capacity))
    if (states := getattr(cache, "states", None)) is not None:
        states.lengths[:] = cursor  # as after a prompt
    ids, index = np.full((rows, slots), 5), np.tile(np.arange(slots), (rows, 1))
    return lambda: backend.step(cache, 0, StepInput(ids, np.full(rows, cursor), index), False)


def prompt_of(backend: Backend, length: int) -> Work:
    """Reads a prompt of so many tokens in pieces."""
    cache, ids = backend.new_cache(1), 100 + np.arange(length)[None] % 200
    cache.reserve(length)

    def read() -> None:
        for start in range(0, length, PIECE):
            piece = ids[:, start : start + PIECE]
            last = np.array([[piece.shape[1] - 1]])
            backend.step(cache, 0, StepInput(piece, np.array([start]), last), False)

    return read


@contextmanager
def clocked() -> Iterator[list[float]]:
    """Seconds inside ONNX Runtime's runs, summed in the list's one entry."""
    inside, plain = [0.0], onnxruntime.InferenceSession.run_with_iobinding

    def run(*arguments: Any) -> None:
        begun = perf_counter()
        plain(*arguments)
        inside[0] += perf_counter() - begun

    with patch.object(onnxruntime.InferenceSession, "run_with_iobinding", run):
        yield inside


def steps_of_an_answer(session: Session, tokens: int) -> Steps:
    """One answer at tau 1, one slot a step; the prompt's steps are left out."""
    found: Steps = []
    with clocked() as inside:
        stream = session.stream(PROMPT, GenerationConfig(tau=1.0, max_new_tokens=tokens, eos_ids=()))
        events = iter(stream)
        while not next(events).token_ids:
            pass
        while True:
            before, begun = inside[0], perf_counter()
            if next(events, None) is None:
                return found
            whole = perf_counter() - begun
            found.append((whole - (inside[0] - before), whole))


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """One row at cursor 128."""
    opening, sessions = dict[str, Times](), dict[str, Session]()
    for path in args.bundles:
        opened(path, args.threads)  # the first one may hash the files
        name, times = Path(path).name, Times()
        times.measure(lambda name=name, path=path: sessions.update({name: opened(path, args.threads)}))
        opening[name] = times
    works = {
        (name, slots): step_of(session.backend, slots)
        for name, session in sessions.items()
        for slots in SLOTS
    }
    steps = {key: Times() for key in works}
    for _ in range(args.rounds):
        one_round(works, steps)
    result: dict[str, Any] = {}
    for name in sessions:
        ran = {str(slots): steps[name, slots] for slots in SLOTS}
        shown = "  ".join(f"{slots}: {times}" for slots, times in ran.items())
        print(f"{name:24} {shown}  open {opening[name].wall[0] / 1000:.2f} s")
        result[name] = {
            "step": {slots: times.summary() for slots, times in ran.items()},
            "open": opening[name].summary(),
        }
    return {"cursor": CURSOR, "ms": result}


def contexts(args: argparse.Namespace) -> dict[str, Any]:
    """One row: prompts in pieces of 256 tokens, and steps after a context."""
    backends = {Path(path).name: opened(path, args.threads).backend for path in args.bundles}
    whats = {f"prompt {n}": lambda b, n=n: prompt_of(b, n) for n in PROMPTS}
    whats |= {
        f"{n} after {at}": lambda b, n=n, at=at: step_of(b, n, cursor=at) for at in CURSORS for n in WIDTHS
    }
    result: dict[str, Any] = {}
    for what, work_of in whats.items():
        works = {name: work_of(backend) for name, backend in backends.items()}
        times = {name: Times() for name in works}
        for _ in range(args.rounds):
            one_round(works, times)
        for name, found in times.items():
            print(f"{what}: {found} {name}", flush=True)
        result[what] = {name: found.summary() for name, found in times.items()}
    return {"ms": result}


def host(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps of all rounds, wall clock."""
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    command = [args.program, args.bundle, str(args.threads), str(args.tokens)]
    steps: dict[str, Steps] = {"Python": [], "C++": []}
    steps_of_an_answer(session, 8)
    for _ in range(args.rounds):
        steps["Python"] += steps_of_an_answer(session, args.tokens)
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        steps["C++"] += [
            (float(outside) / 1e6, float(whole) / 1e6) for outside, whole in map(str.split, lines)
        ]
    result: dict[str, Any] = {"tokens": args.tokens}
    for language, measured in steps.items():
        outside, whole = (1e6 * median(step[i] for step in measured) for i in (0, 1))
        share = median(outside / whole for outside, whole in measured)
        print(f"{language:7} {outside:7.1f} us of {whole / 1000:6.2f} ms outside ONNX Runtime: {share:.2%}")
        counted = {"steps": len(measured), "outside_us": round(outside, 1), "whole_us": round(whole, 1)}
        result[language] = {**counted, "share": round(share, 5)}
    return result


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    def command(
        measure: Callable[[argparse.Namespace], dict[str, Any]], **counts: int
    ) -> argparse.ArgumentParser:
        name = measure.__name__
        made = commands.add_parser(name, description=measure.__doc__, formatter_class=form)
        made.set_defaults(measure=measure)
        many = measure is not host
        name, kind = ("bundles", str) if many else ("bundle", Path)
        made.add_argument(name, metavar="BUNDLE", type=kind, nargs="+" if many else None)
        for option, default in counts.items():
            made.add_argument(f"--{option}", type=int, default=default, metavar="N")
        made.add_argument("--json", type=Path, metavar="FILE")
        return made

    command(cost, threads=2, rounds=20)
    command(contexts, threads=2, rounds=1)
    command(host, threads=2, tokens=64, rounds=5).add_argument("--program", type=Path, default=PROGRAM)
    args = parser.parse_args(words)
    if args.measure is host and not args.program.is_file():
        parser.error(f"{args.program} is not there: `make cpp` builds it")
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = parsed(words)
    found = args.measure(args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        about = {
            name: value for name in ("threads", "rounds") if (value := getattr(args, name, None)) is not None
        }
        about |= {"bundle": args.bundle.name} if "bundle" in args else {}
        args.json.write_text(json.dumps(about | found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
