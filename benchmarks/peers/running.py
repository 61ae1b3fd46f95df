"""Starts the programs that can run here, each in its own process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from peers import catalog, models
from peers.catalog import Program
from peers.machine import say
from peers.process import PeerError, Process


def start(program: Program, args: argparse.Namespace, more: Mapping[str, Any]) -> Process:
    """`args` of the command line: `venvs`, `work`, `threads`."""
    model = program.model / program.options["file"] if "file" in program.options else program.model
    options = {**program.options, "model": str(model), "threads": args.threads, **more}
    command = [catalog.python_of(args.venvs, program.environment), "-m", f"peers.{program.module}"]
    threads = {"OMP_NUM_THREADS": str(args.threads), "ORT_DISABLE_TELEMETRY": "1"}
    return Process(command, options, args.work / "logs" / f"{program.name}.log", threads)


def start_all(
    args: argparse.Namespace, only: Sequence[str] | None, more: Mapping[str, Any]
) -> tuple[dict[str, Process], dict[str, str]]:
    """The processes that run, by name, and why others are absent: programs whose name holds a word of `only`,
    and ours in fp32. `more`: options of all of them.
    """
    (args.work / "logs").mkdir(parents=True, exist_ok=True)
    if problem := models.make(catalog.merged(args.work), args.work):
        sys.exit(f"error: the merged weights of the default checkpoint: {problem}")
    processes: dict[str, Process] = {}
    absent: dict[str, str] = {}
    where = getattr(args, "llama_server", None), getattr(args, "device", "cpu")
    for program in catalog.programs(args.work, args.venvs, *where):
        if only and not any(word in program.name for word in [*only, "ours fp32"]):
            continue
        problem = models.why_absent(program, args.venvs) or models.make(program, args.work)
        if problem is None:
            try:
                processes[program.name] = start(program, args, more)
            except PeerError as error:
                problem = str(error)
        if problem is not None:
            absent[program.name] = problem
            say(f"{program.name}: absent: {problem}")
    return processes, absent
