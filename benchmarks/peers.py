"""Compares mars-export with its peers on the same weights, prompts and threads, in rounds.

    # once: virtual environments with pip, 5 to 60 minutes (llama.cpp is compiled)
    python benchmarks/peers.py --setup
    python benchmarks/peers.py                            # make the models that are absent, then measure
    python benchmarks/peers.py --prompts 128 1000 4000    # how fast each reads a prompt
    python benchmarks/peers.py --shape 0.5B 1.5B          # speeds of Qwen2.5's shapes, random weights

Each peer runs in its own environment under --venvs and answers through benchmarks/peers/; absent ones are
listed. Models are created once, under --work. The peers decode greedily: one token a step, and with the
speculation that each has (n-gram, prompt lookup). tokens/s is end to end, including the prompt.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import catalog, machine, measure, prefill, rows, running, shapes
from peers.catalog import Entry
from peers.machine import say
from peers.measure import Round, Summary
from peers.process import PeerError, Process
from peers.protocol import Request

ROOT = Path(__file__).resolve().parent
REFERENCE = "ours fp32 tau 1"  # whose answers the others are compared with


def tell(text: str) -> None:
    """Progress on one line that is overwritten; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def set_up(venvs: Path, names: list[str]) -> None:
    venvs.mkdir(parents=True, exist_ok=True)
    for name in names:
        for command in catalog.setup_commands(venvs, name):
            say(f"$ {shlex.join(command)}")
            if subprocess.run(command, check=False).returncode:
                say(f"{name}: this step failed; the peer will be named as absent")
                break


class Results:
    """What has been measured so far; `save` after each round keeps it when the run is interrupted."""

    def __init__(self, path: Path, about: dict[str, Any], places: dict[str, str]) -> None:
        """`places`: directories of this machine, by the word that stands for each in what is saved."""
        self.path, self.about, self.places = path, about, places
        self.rounds: dict[tuple[str, str], list[Round]] = {}  # by task and label
        self.entries: dict[str, Entry] = {}
        self.prompts: dict[str, rows.Prompts] = {}

    def add(self, prompts: rows.Prompts, entries: list[Entry], made: dict[str, Round]) -> None:
        self.prompts[prompts.task] = prompts
        for entry in entries:
            self.entries[entry.label] = entry
            if entry.label in made:
                self.rounds.setdefault((prompts.task, entry.label), []).append(made[entry.label])
        self.save()

    def summaries(self) -> list[Summary]:
        """Our fp32 one-token answers are the reference of each task."""
        wanted = {task: made[0].answers for (task, label), made in self.rounds.items() if label == REFERENCE}
        found = []
        for (task, label), made in self.rounds.items():
            accuracy = self.prompts[task].accuracy(made[0].answers)
            found.append(measure.summarize(self.entries[label], task, made, accuracy, wanted.get(task)))
        return found

    def save(self) -> None:
        made = [
            {
                "task": task,
                "label": label,
                "seconds": [r.seconds for r in rounds],
                "tokens": [r.tokens for r in rounds],
            }
            for (task, label), rounds in self.rounds.items()
        ]
        summaries = [summary.to_dict() for summary in self.summaries()]
        machine.save(self.path, {"about": self.about, "summaries": summaries, "rounds": made}, self.places)


def warm_up(processes: dict[str, Process], prompts: rows.Prompts, absent: dict[str, str]) -> None:
    """One short answer in each way that is measured: first use builds caches, and ours measures what a step
    costs. What fails is closed and named.
    """
    for entry in list(catalog.entries(list(processes))):
        if entry.program not in processes:
            continue
        settings = dict(entry.settings)
        request = Request(list(prompts.ids[0]), 8, list(prompts.eos), prompts.mask, settings)
        try:
            processes[entry.program].answer(request)
        except PeerError as error:
            absent[entry.program] = str(error)
            say(f"{entry.program}: absent: {error}")
            processes.pop(entry.program).close()


def measure_all(args: argparse.Namespace, processes: dict[str, Process], results: Results) -> None:
    entries = list(catalog.entries(list(processes)))
    for number in range(args.rounds):
        for task, count in {"assistant": args.rows, "arithmetic": args.arithmetic_rows}.items():
            prompts = rows.read(task, count, args.work / "fp32.bundle")
            say(f"round {number + 1} of {args.rounds}, {task}")
            made, failed = measure.run_round(entries, processes, prompts, number * 5, tell)
            for label, reason in failed.items():
                say(f"{label}: failed: {reason}")
                results.about["failed"][f"{task}, {label}"] = reason
            results.add(prompts, entries, made)


def measure_shapes(args: argparse.Namespace) -> None:
    path, about, sizes = args.json.with_name("shapes.json"), machine.about(args.threads), dict[str, Any]()
    for shape in args.shape:
        found, absent = shapes.measure(args, shape, args.rounds)
        sizes[shape] = {"figures": found, "absent": absent}
        places = {"VENVS": str(args.venvs), "WORK": str(args.shapes), "python": sys.executable}
        machine.save(path, {"about": about, "random weights": True, "sizes": sizes}, places)
        print(shapes.table(shape, found))
        print(*(f"absent: {name}: {reason}" for name, reason in absent.items()), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venvs", type=Path, default=Path("build/peers/venvs"), help="one virtual environment for each peer"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/peers"), help="models and logs, made where absent"
    )
    parser.add_argument(
        "--setup",
        nargs="*",
        choices=list(catalog.ENVIRONMENTS),
        metavar="NAME",
        help="create these environments (all) and stop",
    )
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server, for its speculation")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="only programs whose name holds one of these words, and ours in fp32",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=list(catalog.PRECISIONS), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=6, help="assistant rows")
    parser.add_argument("--arithmetic-rows", type=int, default=4)
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="instead: tokens/s of prompts of these lengths to the first token; prompts.json beside --json",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=("0.5B", "1.5B", "7B"),
        default=[],
        help="instead: speeds at these sizes",
    )
    parser.add_argument(
        "--shapes", type=Path, default=Path("build/peers/shapes"), help="models of --shape, made where absent"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "peers.json")
    args = parser.parse_args()
    wrong = [
        f"--{name}" for name in ("threads", "rounds", "rows", "arithmetic_rows") if getattr(args, name) < 1
    ]
    if wrong:
        parser.error(f"{', '.join(wrong)} must be positive".replace("_", "-"))
    # Environments must be named absolutely; resolving links would lead out of a virtual environment.
    args.venvs, args.work, args.shapes = (p.absolute() for p in (args.venvs, args.work, args.shapes))
    if args.setup is not None:
        set_up(args.venvs, args.setup or list(catalog.ENVIRONMENTS))
        return
    if args.shape:
        measure_shapes(args)
        return
    places = {"VENVS": str(args.venvs), "WORK": str(args.work), "python": sys.executable}
    about: dict[str, Any] = {**machine.about(args.threads), "failed": {}}
    options = {"context": max(args.prompts) + 16} if args.prompts else {}
    processes, absent = running.start_all(args, args.only, options)
    about |= {"absent": absent, "versions": {name: p.versions for name, p in processes.items()}}
    results = Results(args.json, about, places)
    bundle = args.work / "fp32.bundle"
    try:
        if REFERENCE.removesuffix(" tau 1") not in processes:
            sys.exit("error: our own fp32 bundle does not run, so there is nothing to compare with")
        if args.prompts:
            texts = rows.read("assistant", 12, bundle)
            found = prefill.measure(processes, texts, args.prompts, args.rounds)
            machine.save(args.json.with_name("prompts.json"), {"about": about, "prompts": found}, places)
            print(prefill.table(found))
            return
        warm_up(processes, rows.read("assistant", 1, bundle), absent)
        measure_all(args, processes, results)
    except KeyboardInterrupt:
        say(f"\ninterrupted; what was measured is in {args.json}")
    finally:
        for process in processes.values():
            process.close()
    print(measure.table(results.summaries()))
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # while models were made or loaded: adapters end with their stdin
        say("\ninterrupted before anything was measured")
        sys.exit(130)
