"""Compares mars-export with its peers on the same weights, prompts and threads, in rounds.

    # once: virtual environments with pip, 5 to 60 minutes (llama.cpp is compiled)
    python benchmarks/peers.py --setup
    python benchmarks/peers.py --authors MARS_CHECKOUT    # make the models that are absent, then measure
    python benchmarks/peers.py --turns 1000 --rounds 9    # the second turn of a talk, beside llama.cpp
    python benchmarks/peers.py --prompts 128 1000 4000    # how fast each reads a prompt
    python benchmarks/peers.py --memory                   # what each has in memory

Each peer runs in its own environment under --venvs and answers through benchmarks/peers/; absent ones are
listed. Models are created once, under --work. The peers decode greedily: one token a step, and with the
speculation that each has (n-gram, prompt lookup). tokens/s is end to end, including the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import catalog, machine, measure, models, prefill, resident, rows, turns
from peers.catalog import Entry, Program
from peers.measure import Round, Summary
from peers.process import PeerError, Process
from peers.protocol import Request
from peers.resident import Resident
from peers.rounds import run_round

ROOT = Path(__file__).resolve().parent
REFERENCE = "ours fp32 tau 1"  # whose answers the others are compared with


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def start(program: Program, args: argparse.Namespace) -> Process:
    model = program.model / program.options["file"] if "file" in program.options else program.model
    longer = turns.KEEPING if args.turns else {"context": max(args.prompts) + 16} if args.prompts else {}
    options = {**program.options, **longer, "model": str(model), "threads": args.threads}
    command = [catalog.python_of(args.venvs, program.environment), "-m", f"peers.{program.module}"]
    threads = {"OMP_NUM_THREADS": str(args.threads), "ORT_DISABLE_TELEMETRY": "1"}
    return Process(command, options, args.work / "logs" / f"{program.name}.log", threads)


def start_all(args: argparse.Namespace) -> tuple[dict[str, Process], dict[str, str]]:
    """The processes that run, by name, and why others are absent."""
    (args.work / "logs").mkdir(parents=True, exist_ok=True)
    merged = Program(
        "merged", None, "", args.work / "merged", (sys.executable, "-m", "peers.merged", "{out}")
    )
    if problem := models.make(merged, args.work):
        sys.exit(f"error: the merged weights of the default checkpoint: {problem}")
    processes: dict[str, Process] = {}
    absent = (
        {} if args.authors else {"authors fp32": "no checkout; give --authors PATH (github.com/Xalp/MARS)"}
    )
    for program in catalog.programs(args.work, args.venvs, args.authors, args.llama_server):
        if args.only and not any(word in program.name for word in [*args.only, "ours fp32"]):
            continue
        if args.turns and not turns.takes_part(program.name):
            continue
        problem = models.why_absent(program, args.venvs) or models.make(program, args.work)
        if problem is None:
            try:
                processes[program.name] = start(program, args)
            except PeerError as error:
                problem = str(error)
        if problem is not None:
            absent[program.name] = problem
            say(f"{program.name}: absent: {problem}")
    return processes, absent


class Results:
    """What has been measured so far; `save` after each round keeps it when the run is interrupted."""

    def __init__(self, path: Path, about: dict[str, Any], places: dict[str, str]) -> None:
        """`places`: directories of this machine, by the word that stands for each in what is saved."""
        self.path, self.about, self.places = path, about, places
        self.rounds: dict[tuple[str, int, str], list[Round]] = {}
        self.prompts: dict[str, rows.Prompts] = {}
        self.entries: dict[tuple[int, str], Entry] = {}

    def add(self, prompts: rows.Prompts, entries: list[Entry], made: dict[str, Round]) -> None:
        known = self.prompts.get(prompts.task)
        if known is None or len(known.rows) < len(
            prompts.rows
        ):  # all are first rows of one file: the longest serves all
            self.prompts[prompts.task] = prompts
        for entry in entries:
            self.entries[entry.batch, entry.label] = entry
            if entry.label in made:
                self.rounds.setdefault((prompts.task, entry.batch, entry.label), []).append(made[entry.label])
        self.save()

    def summaries(self) -> list[Summary]:
        found = []
        for (task, batch, label), rounds in self.rounds.items():
            kind, prompts = self.entries[batch, label].kind, self.prompts[task]
            reference = self.reference(task)
            same_rows = reference is not None and len(reference) >= len(rounds[0].answers)
            wanted = reference[: len(rounds[0].answers)] if reference and same_rows else None
            found.append(
                measure.summarize(
                    label, kind, task, batch, rounds, prompts.accuracy(rounds[0].answers), wanted
                )
            )
        return found

    def reference(self, task: str) -> measure.Ids | None:
        """Our fp32 one-token answers: those of the largest set of rows."""
        answers = [
            r[0].answers for (t, _, label), r in self.rounds.items() if t == task and label == REFERENCE
        ]
        return max(answers, key=len, default=None)

    def save(self) -> None:
        summaries = self.summaries()
        value = {
            "about": self.about,
            "summaries": [s.to_dict() for s in summaries],
            "rounds": [
                {
                    "task": task,
                    "batch": batch,
                    "label": label,
                    "seconds": [r.seconds for r in rounds],
                    "tokens": [r.tokens for r in rounds],
                }
                for (task, batch, label), rounds in self.rounds.items()
            ],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        text = json.dumps(value, indent=1)
        for word, place in self.places.items():
            text = text.replace(place, word)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def warm_up(processes: dict[str, Process], prompts: rows.Prompts, absent: dict[str, str]) -> None:
    """One short answer in each way that is measured: first use builds caches, and ours measures what a step
    costs. What fails is closed and named.
    """
    for name in list(processes):
        for entry in catalog.single_entries([name]):
            request = Request(
                [list(prompts.ids[0])], [8], list(prompts.eos), prompts.mask, dict(entry.settings)
            )
            try:
                processes[name].answer(request)
            except PeerError as error:
                absent[name] = str(error)
                say(f"{name}: absent: {error}")
                processes.pop(name).close()
                break


def measure_all(args: argparse.Namespace, processes: dict[str, Process], results: Results) -> None:
    bundle = args.work / "fp32.bundle"
    counts = {"assistant": args.rows, "arithmetic": args.arithmetic_rows}
    batched = [f"ours {p}" for p in args.batch_bundles if f"ours {p}" in processes]
    for number in range(args.rounds):
        for task, count in counts.items():
            plan: list[tuple[int, list[Entry]]] = [(count, catalog.single_entries(list(processes)))]
            found = catalog.batch_entries(batched)
            plan += [
                (args.batch_rows, [e for e in found if e.batch == batch])
                for batch in catalog.BATCHES
                if batched and args.batch_rows
            ]
            for most, entries in plan:
                if not most or not entries:
                    continue
                prompts = rows.read(task, most, bundle)
                say(f"round {number + 1} of {args.rounds}, {task}, batch {entries[0].batch}")
                made, failed = run_round(entries, processes, prompts, number * 5, tell)
                for label, reason in failed.items():
                    say(f"{label}: failed: {reason}")
                    results.about["failed"][f"{task}, batch {entries[0].batch}, {label}"] = reason
                results.add(prompts, entries, made)


def save(args: argparse.Namespace, what: str, about: dict[str, Any], found: dict[str, Any]) -> None:
    """To a file of its own beside --json, without the paths of this machine."""
    path = args.json.with_name(f"{what}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about, what: found}, indent=1)
    text = text.replace(str(args.venvs), "VENVS").replace(str(args.work), "WORK")
    path.write_text(text.replace(sys.executable, "python") + "\n", encoding="utf-8")


def compare_turns(args: argparse.Namespace, processes: dict[str, Process], about: dict[str, Any]) -> None:
    prompts = rows.read("assistant", 12, args.work / "fp32.bundle")
    found = turns.measure(processes, prompts, args.turns, args.rounds)
    save(args, "turns", about, {name: each.to_dict() for name, each in found.items()})
    print(turns.table(found))


def compare_prompts(args: argparse.Namespace, processes: dict[str, Process], about: dict[str, Any]) -> None:
    prompts = rows.read("assistant", 12, args.work / "fp32.bundle")
    found = prefill.measure(processes, prompts, args.prompts, args.rounds)
    save(args, "prompts", about, found)
    print(prefill.table(found))


def weigh(args: argparse.Namespace, processes: dict[str, Process], about: dict[str, Any]) -> None:
    """Each process behind its first short answers. `own` holds Python and the libraries, too."""
    found = {name: Resident.of(process.pid) for name, process in processes.items()}
    save(args, "memory", about, {name: each.to_dict() for name, each in found.items()})
    print(resident.table(found))


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
    parser.add_argument("--authors", type=Path, help="a checkout of the authors' code (github.com/Xalp/MARS)")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server, for its speculation")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="only programs whose name holds one of these words, and ours in fp32",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=6, help="assistant rows, one at a time")
    parser.add_argument("--arithmetic-rows", type=int, default=4)
    parser.add_argument(
        "--batch-rows", type=int, default=16, help="rows of each task in batches; 0: no batches"
    )
    parser.add_argument("--batch-bundles", nargs="*", choices=catalog.PRECISIONS, default=["fp32", "w8a8"])
    parser.add_argument(
        "--turns",
        type=int,
        default=0,
        metavar="TOKENS",
        help="instead: the second turn behind a history of so many tokens, ours and llama.cpp, kept by both;"
        " written to turns.json beside --json",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="instead: tokens/s of prompts of these lengths to the first token; prompts.json beside --json",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="instead: what each process has in memory behind a first answer; memory.json beside --json",
    )
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "peers.json")
    args = parser.parse_args()
    wrong = [
        f"--{name}" for name in ("threads", "rounds", "rows", "arithmetic_rows") if getattr(args, name) < 1
    ]
    if wrong or args.batch_rows < 0:
        parser.error(f"{', '.join(wrong) or '--batch-rows'} must be positive".replace("_", "-"))
    if args.authors is not None and not (args.authors / "mars" / "samplers").is_dir():
        parser.error(
            f"--authors {args.authors}: no mars/samplers there; give a checkout of github.com/Xalp/MARS"
        )
    # Environments must be named absolutely; resolving links would lead out of a virtual environment.
    args.venvs, args.work = args.venvs.absolute(), args.work.absolute()
    if args.setup is not None:
        set_up(args.venvs, args.setup or list(catalog.ENVIRONMENTS))
        return
    about: dict[str, Any] = {
        "machine": machine.describe(args.threads),
        "command": " ".join(["python", "benchmarks/peers.py", *words()]),
        "failed": {},
    }
    processes, absent = start_all(args)
    about |= {"absent": absent, "versions": {name: p.versions for name, p in processes.items()}}
    results = Results(
        args.json, about, {"VENVS": str(args.venvs), "WORK": str(args.work), "python": sys.executable}
    )
    try:
        if REFERENCE.removesuffix(" tau 1") not in processes:
            sys.exit("error: our own fp32 bundle does not run, so there is nothing to compare with")
        if args.turns:
            compare_turns(args, processes, about)
            return
        if args.prompts:
            compare_prompts(args, processes, about)
            return
        warm_up(processes, rows.read("assistant", 1, args.work / "fp32.bundle"), absent)
        if args.memory:
            weigh(args, processes, about)
            return
        measure_all(args, processes, results)
    except KeyboardInterrupt:
        say(f"\ninterrupted; what was measured is in {args.json}")
    finally:
        for process in processes.values():
            process.close()
    summaries = results.summaries()
    print(measure.table(summaries))
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")


def words() -> list[str]:
    """The arguments without the paths of this machine."""
    return [shlex.quote(Path(word).name if os.sep in word else word) for word in sys.argv[1:]]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # while models were made or loaded: adapters end with their stdin
        say("\ninterrupted before anything was measured")
        sys.exit(130)
