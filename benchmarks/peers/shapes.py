"""Speeds at real sizes, with random weights: nothing that is decoded means anything, and no system guesses
tokens. Ours is timed by the step, because exact mode's speed is that of its steps times tokens per forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median
from time import sleep
from typing import Any

import numpy as np

from peers import catalog, models, running
from peers.machine import say
from peers.prefill import PAUSE
from peers.process import PeerError, Process
from peers.protocol import Request

SLOTS = (8, 19)  # of exact mode's steps with short and with long drafts
PROMPTS, CONTEXT, ANSWER = (128, 1000), 1024, 17  # tokens
COLUMNS = ("one token, ms", *(f"{n} slots" for n in SLOTS), *(f"prompt {n}, tokens/s" for n in PROMPTS))
COLUMNS += ("opening, s", "memory, GB", "of it anonymous")


def measure(args: argparse.Namespace, shape: str, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures by program and column, medians of interleaved rounds, and why programs are absent. The second
    opening counts, with the files in memory.
    """
    work = args.work = args.shapes / shape
    (work / "logs").mkdir(parents=True, exist_ok=True)
    absent, processes, found = dict[str, str](), dict[str, Process](), dict[str, dict[str, list[float]]]()
    if problem := models.make(catalog.random(work, shape), work):
        return {}, {"all": problem}
    for program in catalog.at_size(work, args.venvs):
        if args.only and not any(word in program.name for word in args.only):
            continue
        problem = models.why_absent(program, args.venvs) or models.make(program, work)
        try:
            if problem is None:
                running.start(program, args, {"context": CONTEXT}).close()
                processes[program.name] = running.start(program, args, {"context": CONTEXT})
        except PeerError as error:
            problem = str(error)
        if problem is not None:
            absent[program.name] = problem
            say(f"{shape}, {program.name}: absent: {problem}")
    draw = np.random.default_rng(0)
    try:
        for number in range(rounds + 1):  # the first one warms up
            say(f"{shape}, round {number} of {rounds}")
            for name, process in processes.items():
                sleep(PAUSE)
                made = one_round(process, name.startswith("ours"), draw)
                for column, value in made.items() if number else ():
                    found.setdefault(name, {}).setdefault(column, []).append(value)
        for name, process in processes.items():
            found[name]["opening, s"] = [process.load_seconds]
            found[name]["memory, GB"], found[name]["of it anonymous"] = ([gb] for gb in process.memory())
    finally:
        for process in processes.values():
            process.close()
    return {name: {c: round(median(v), 2) for c, v in of.items()} for name, of in found.items()}, absent


def one_round(process: Process, is_ours: bool, draw: np.random.Generator) -> dict[str, float]:
    """Prompts to their first token; the time of a token after a short prompt; steps of more slots."""
    made = {}
    for length in PROMPTS:
        ids = draw.integers(0, 256, length).tolist()  # no two begin alike
        limit = ANSWER if length == min(PROMPTS) else 1
        settings = {"tau": 1.0} if is_ours else {}
        reply = process.answer(Request(ids, limit, [catalog.UNUSED_TOKEN], 0, settings))
        made[f"prompt {length}, tokens/s"] = length / reply.first_seconds
        if limit > 1:
            rest = len(reply.token_ids) - reply.first_tokens
            made[COLUMNS[0]] = 1000 * (reply.seconds - reply.first_seconds) / max(1, rest)
    for slots in SLOTS if is_ours else ():
        reply = process.answer(Request([], slots, [], 0, {"slots": slots}))
        made[f"{slots} slots"] = 1000 * reply.seconds
    return made


def table(shape: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown. The last column: a step's time in tokens of the fastest peer, above which it is ahead."""
    lines = [f"| {shape}, random weights | " + " | ".join(COLUMNS) + " | ahead from, tokens a forward |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    fastest = min((of[COLUMNS[0]] for name, of in found.items() if "ours" not in name), default=None)
    for name, of in found.items():
        cells = [f"{of[column]:,.4g}" if column in of else "" for column in COLUMNS]
        steps = [
            f"{of[f'{slots} slots'] / fastest:.2f} ({slots})" for slots in SLOTS if fastest and "ours" in name
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {', '.join(steps)} |")
    return "\n".join(lines)
