"""The second turn of a talk, and many requests with one system prompt, with saved prefixes and without.

    python benchmarks/prefix.py BUNDLE [--history 1000] [--question 30] [--rounds 9]
                                [--requests 50] [--system 800] [--batch 8] [--new 32] [--threads 2]
                                [--json FILE]

Two sessions of one bundle, one without a store, take turns within each round, the first of them by turns.
Every round has texts of its own, so that a hit is one of its own first turn. `turn`: a history is read and
answered, then a question behind it is timed to its first token. `requests`: as many with one beginning, so
many at a time, the store forgotten before. `miss`: looking up a prompt that has nothing in common with what
is saved, beside a one-slot step.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mars_export.runtime import Completion, GenerationConfig, Session


class Texts:
    """Token ids that no other text begins with."""

    def __init__(self, session: Session, seed: int) -> None:
        tokens = session.bundle.manifest.tokens
        special = {tokens.mask, *tokens.eos}
        self._ids = [i for i in range(session.bundle.manifest.model.vocab_size) if i not in special]
        self._draw = random.Random(seed)

    def ids(self, count: int) -> list[int]:
        return self._draw.choices(self._ids, k=count)


def in_turn(number: int, sessions: dict[str, Session], work: Callable[[Session], Any]) -> dict[str, Any]:
    """What `work` gives for each session, another one first in each round."""
    order = list(sessions.items())
    return {name: work(session) for name, session in (order if number % 2 else order[::-1])}


def turns(sessions: dict[str, Session], args: argparse.Namespace) -> dict[str, Any]:
    texts, config = Texts(sessions["with"], 1), GenerationConfig(max_new_tokens=args.new, eos_ids=())
    rows: dict[str, list[Completion]] = {name: [] for name in sessions}
    for number in range(args.rounds):
        history, question = texts.ids(args.history), texts.ids(args.question)

        def second(
            session: Session, history: list[int] = history, question: list[int] = question
        ) -> Completion:
            first = session.generate(history, config)
            return session.generate([*history, *first.token_ids, *question], config)

        for name, done in in_turn(number, sessions, second).items():
            rows[name].append(done)
    times = {name: median(done.stats.time_to_first_token for done in all_) for name, all_ in rows.items()}
    last = rows["with"][-1].stats
    return {
        "first_token_s": times,
        "ratio": times["with"] / times["without"],
        "cached_tokens": last.cached_tokens,
        "prompt_tokens": last.prompt_tokens,
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in zip(*rows.values(), strict=True)),
        "rounds": args.rounds,
    }


def requests(sessions: dict[str, Session], args: argparse.Namespace) -> dict[str, Any]:
    texts, config = Texts(sessions["with"], 2), GenerationConfig(max_new_tokens=args.new, eos_ids=())
    times: dict[str, list[float]] = {name: [] for name in sessions}
    cached: dict[str, int] = {}
    for number in range(max(1, args.rounds // 3)):
        system = texts.ids(args.system)
        prompts = [[*system, *texts.ids(args.question)] for _ in range(args.requests)]

        def all_of_them(session: Session, prompts: list[list[int]] = prompts) -> tuple[float, int]:
            session.forget_prefixes()
            begun = perf_counter()
            done = list(session.generate_each(prompts, config, batch=args.batch))
            return perf_counter() - begun, sum(d.stats.cached_tokens for d in done)

        for name, (seconds, tokens) in in_turn(number, sessions, all_of_them).items():
            times[name].append(seconds)
            cached[name] = tokens
    middle = {name: median(seconds) for name, seconds in times.items()}
    return {
        "total_s": middle,
        "ratio": middle["with"] / middle["without"],
        "cached_tokens": cached,
        "prompt_tokens": args.requests * (args.system + args.question),
    }


def miss(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    texts, store = Texts(session, 3), session._prefixes
    store.clear()
    for _ in range(20):
        session.generate(texts.ids(args.history // 4), GenerationConfig(max_new_tokens=1))
    group = next(iter(store._sorted))
    prompt = texts.ids(args.history)
    cache, seconds = session.backend.new_cache(1), []
    cache.reserve(64)
    zero = np.zeros((1, 1), np.int64)
    for _ in range(20):
        begun = perf_counter()
        store.match(group, prompt)
        between = perf_counter()
        session.backend.step(cache, 0, zero, np.array([32]), zero, False)
        seconds.append((between - begun, perf_counter() - between))
    look, step = (median(values) for values in zip(*seconds, strict=True))
    return {"lookup_s": look, "step_s": step, "ratio": look / step, "entries": store.stats.entries}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    for name, default in (
        ("history", 1000), ("question", 30), ("rounds", 9), ("requests", 50), ("system", 800), ("batch", 8),
        ("new", 32), ("threads", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sessions = {
        "with": Session.open(args.bundle, threads=args.threads, cache_bytes=1 << 30),
        "without": Session.open(args.bundle, threads=args.threads, cache_bytes=0),
    }
    sessions["without"].cost = sessions["with"].cost  # the same windows
    results = {
        "bundle": args.bundle.name,
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, int)},
    }
    for name, values in (
        ("turn", turns(sessions, args)),
        ("requests", requests(sessions, args)),
        ("miss", miss(sessions["with"], args)),
    ):
        print(name, json.dumps(values))
        results[name] = values
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
