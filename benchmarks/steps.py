"""Measures the cost of decode steps and the effect of settings. Rounds are interleaved over all settings.

    python benchmarks/steps.py cost BUNDLE...        a step by its slots, its host time, opening a bundle
    python benchmarks/steps.py settings BUNDLE       KV capacity, prefill chunk, how threads wait
    python benchmarks/steps.py host BUNDLE           a step outside ONNX Runtime: Python, C++ (make cpp)
    python benchmarks/steps.py one-token BUNDLE DIR  one-token mode beside transformers' generate
    python benchmarks/steps.py sampling BUNDLE       a forward of drawn answers beside greedy ones
    python benchmarks/steps.py window BUNDLE         the adaptive window beside fixed ones, by wall clock
    python benchmarks/steps.py replay BUNDLE...      the same from recorded predictions and the cost table

Each takes --threads, --rounds or --rows, and --json FILE. Times are milliseconds, median (smallest); on a
busy machine read the CPU time of `--threads 1`, which other processes hardly change, and not the wall clock.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks.tasks import load
from mars_export.runtime.decode.backend import Backend, bucket
from step_times import CURSOR, Steps, Times, Work, one_round, step_of, steps_of_an_answer
from step_windows import replay, window

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "build" / "cpp" / "release" / "tests" / "mars-host-time"
SLOTS = (1, 2, 4, 8, 15)
DATA = HERE.parent / "examples" / "default-checkpoint" / "data"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1, top-k 50": {"temperature": 1.0, "top_k": 50},
}
TEXT, NEW_TOKENS = "The history of the steam engine begins in the first century, when", 48


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """One row at cursor 128. The peer is a process of its own, at the same cursor with as many threads."""
    opened, sessions = {path.name: Times() for path in args.bundles}, {}
    for path in args.bundles:
        Session.open(path, threads=args.threads, cache_bytes=0)  # the first one may hash the files
        opened[path.name].measure(
            lambda path=path: sessions.update(
                {path.name: Session.open(path, threads=args.threads, cache_bytes=0)}
            )
        )
    works = {
        (name, slots): step_of(session.backend, slots, CURSOR, CURSOR + slots)
        for name, session in sessions.items()
        for slots in SLOTS
    }
    steps, token = {key: Times() for key in works}, Times()
    command = [args.genai, HERE / "peers" / "genai_step.py", args.genai_model, str(args.threads), str(CURSOR)]
    peer = subprocess.Popen(command, stdin=-1, stdout=-1, text=True) if args.genai else None
    for _ in range(args.rounds):
        one_round(works, steps, lambda _: 3)
        if peer and peer.stdin and peer.stdout:
            print(4, file=peer.stdin, flush=True)
            for wall, cpu in json.loads(peer.stdout.readline()):
                token.wall.append(wall)
                token.cpu.append(cpu)
    result: dict[str, Any] = {}
    for name, session in sessions.items():
        host = [
            *steps_of_an_answer(session, 24, process_time),
            *steps_of_an_answer(session, 24, process_time),
        ]
        share = min(outside for outside, _ in host) / min(whole for _, whole in host)
        ran = {str(slots): steps[name, slots] for slots in SLOTS}
        shown = "  ".join(f"{slots}: {times}" for slots, times in ran.items())
        print(f"{name:24} {shown}  outside {share:.1%}  open {opened[name].wall[0] / 1000:.2f} s")
        result[name] = {
            "step": {slots: times.summary() for slots, times in ran.items()},
            "host_share_one_token": round(share, 4),
            "open": opened[name].summary(),
        }
    if peer:
        peer.communicate()
        print(f"{'onnxruntime-genai':24} token: {token}")
        result["onnxruntime-genai"] = {"token": token.summary()}
    return {"cursor": CURSOR, "ms": result}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Capacity: a step at cursor 100, and allocating memory and growing it once. Threads: spin or sleep."""
    cursor, prompt = 100, 480
    waits = {
        (threads, spins): _opened(args.bundle, threads, spins)
        for threads in (1, 2, 4)
        for spins in (True, False)
    }
    usual = waits[2, True]
    works: dict[str, Work] = {}
    for capacity in (128, 256, 512, 1024, 2048):
        works |= {f"capacity {capacity}, {s} slots": step_of(usual, s, cursor, capacity) for s in (1, 8)}
        works[f"new memory of {capacity}, grown once"] = _growth(usual, capacity)
    works |= {f"prefill of {prompt} by {n}": _prefill(usual, prompt, n) for n in (32, 64, 128, 256, prompt)}
    for (threads, spins), backend in waits.items():
        head = f"{threads} threads {'spinning' if spins else 'sleeping'}"
        works |= {f"{head}, {s} slots": step_of(backend, s, cursor, 256) for s in (1, 8)}
    times = {name: Times() for name in works}
    for _ in range(args.rounds):
        one_round(works, times, lambda name: 1 if "prefill" in name else 3)
    for name, each in times.items():
        print(f"{name:44} {each}")
    return {"cursor": cursor, "prompt": prompt, "ms": {name: each.summary() for name, each in times.items()}}


def _opened(path: Path, threads: int, spins: bool) -> Backend:
    """A session whose threads wait as asked; the runtime itself leaves ONNX Runtime's default."""
    plain = onnxruntime.SessionOptions

    def options() -> Any:
        made = plain()
        made.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
        return made

    with patch.object(onnxruntime, "SessionOptions", options):
        return Session.open(path, threads=threads, cache_bytes=0).backend


def _growth(backend: Backend, capacity: int) -> Work:
    """Allocating KV memory and then growing it once: what is copied is less than this."""

    def grow() -> None:
        cache = backend.new_cache(1)
        cache.reserve(capacity)
        cache.reserve(bucket(capacity + 1, capacity))

    return grow


def _prefill(backend: Backend, prompt: int, chunk: int) -> Work:
    ids = np.arange(prompt, dtype=np.int64)[None] % 200 + 1

    def prefill() -> None:
        cache = backend.new_cache(1)
        cache.reserve(prompt)
        for start in range(0, prompt, chunk):
            part = ids[:, start : start + chunk]
            backend.step(cache, 0, part, np.array([start], np.int64), np.array([[part.shape[1] - 1]]), False)

    return prefill


def host(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps of all rounds, wall clock."""
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    command = [args.program, args.bundle, str(args.threads), str(args.tokens)]
    steps: dict[str, Steps] = {"Python": [], "C++": []}
    steps_of_an_answer(session, 8, perf_counter)
    for _ in range(args.rounds):
        steps["Python"] += steps_of_an_answer(session, args.tokens, perf_counter)
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


def one_token(args: argparse.Namespace) -> dict[str, Any]:
    """BUNDLE must be an fp32 export of DIRECTORY, a plain Hugging Face one."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    config = GenerationConfig(tau=1.0, max_new_tokens=NEW_TOKENS, eos_ids=())
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([session.encode(TEXT)])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    ours, theirs = (f"{name}, {NEW_TOKENS} tokens" for name in ("one-token mode", "transformers generate"))
    works: dict[str, Work] = {
        ours: lambda: session.generate(TEXT, config),
        theirs: lambda: model.generate(ids, max_new_tokens=NEW_TOKENS, **given),
    }
    times = {name: Times() for name in works}
    for index in range(args.rounds + 1):
        for name, work in works.items():
            times[name].measure(work) if index else work()
    medians = {name: median(each.wall) for name, each in times.items()}
    for name, value in medians.items():
        print(f"{name:34} {value:8.1f} ms")
    ratio = medians[theirs] / medians[ours]
    print(f"one-token mode is {ratio:.2f}x as fast as transformers")
    return {"median_ms": medians, "ratio": ratio}


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of a forward in exact mode with full windows, tool calls; medians over the rounds."""
    session = Session.open(args.bundle, threads=args.threads, cache_bytes=0)
    prompts = [session.encode(task.prompt) for task in load(DATA / "assistant.test.jsonl")[: args.rows]]
    plain = GenerationConfig(max_new_tokens=48, window="full")
    configs = {name: plain.with_values(**changes) for name, changes in SAMPLING.items()}
    spent: dict[str, list[float]] = {name: [] for name in configs}
    for index in range(args.rounds + 1):
        for name, config in configs.items():
            begun = process_time()
            forwards = sum(session.generate(prompt, config).stats.forwards for prompt in prompts)
            spent[name] += [1000 * (process_time() - begun) / forwards] if index else []
    medians = {name: median(times) for name, times in spent.items()}
    for name, value in medians.items():
        print(f"{name:25} {value:6.2f} ms, {value / medians['greedy']:.3f} of greedy")
    return {"rows": args.rows, "median_cpu_ms": medians}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    def command(
        measure: Callable[[argparse.Namespace], dict[str, Any]], **counts: int
    ) -> argparse.ArgumentParser:
        name = measure.__name__.replace("_", "-")
        made = commands.add_parser(name, description=measure.__doc__, formatter_class=form)
        made.set_defaults(measure=measure)
        many = name in ("cost", "replay")
        made.add_argument(
            "bundles" if many else "bundle", metavar="BUNDLE", type=Path, nargs="+" if many else None
        )
        for option, default in counts.items():
            made.add_argument(f"--{option}", type=int, default=default, metavar="N")
        made.add_argument("--json", type=Path, metavar="FILE")
        return made

    peer = command(cost, threads=2, rounds=20)
    peer.add_argument("--genai", type=Path, metavar="PYTHON", help="of an environment with onnxruntime-genai")
    peer.add_argument("--genai-model", type=Path, metavar="DIRECTORY", help="what its model builder wrote")
    command(settings, rounds=10)
    command(host, threads=2, tokens=64, rounds=5).add_argument("--program", type=Path, default=PROGRAM)
    command(one_token, threads=2, rounds=7).add_argument("directory", metavar="DIR", type=Path)
    command(sampling, threads=1, rows=6, rounds=5)
    for each in (command(window, threads=2, rows=6, rounds=3), command(replay, threads=2, rows=20)):
        each.add_argument("--taus", type=float, nargs="+", default=[0.95, 0.8])
    args = parser.parse_args(words)
    if args.measure is cost and (args.genai is None) != (args.genai_model is None):
        parser.error("--genai and --genai-model go together")
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
