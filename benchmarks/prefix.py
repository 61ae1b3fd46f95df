"""The second turn of a conversation, and many requests with one system prompt, with a prefix cache and
without.

    python benchmarks/prefix.py BUNDLE [--only NAME ...] [--history 1000] [--question 30] [--rounds 9]
                                [--requests 50] [--system 800] [--batch 8] [--new 32] [--threads 2]
                                [--talks 10000] [--json FILE]
    python benchmarks/prefix.py --only memory          # needs no bundle

Two sessions of one bundle, one without a cache, alternate within each round. Every round has its own texts,
so that a hit is always one of its own first turn.

turn      a history is read and answered, then a question after it is timed to its first token (goal: 0.12
          of the time without)
requests  many with one beginning, `--batch` at a time, with an empty cache at first (goal: 0.35)
miss      looking up a prompt that has nothing in common with what is saved, beside a one-slot step (goal:
          0.01)
restart   a session that was just opened, with a prefix directory and without: a system prompt of `--history`
          tokens and a question, timed to the first token (goal: 0.15)
memory    random talks over a backend without a model: bytes that saved entries hold, and growth of the
          process (goal: never above the budget)
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mars_export import Completion, GenerationConfig, Session
from mars_export.runtime import machine
from mars_export.runtime.decode.backend import StepOutput
from mars_export.runtime.decode.prefix import Prefixes
from mars_export.runtime.decode.row import Row
from mars_export.runtime.decode.schedule import Limits, Schedule, run
from mars_export.runtime.device.kv import KvRows
from mars_export.runtime.device.memory import HostMemory

NAMES = ("turn", "requests", "miss", "restart", "memory")


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


class Echo:
    """A backend that knows no model: real host memory, tokens by counting."""

    outputs = ("token_ids", "confidence")
    max_slots = max_outputs = None
    max_capacity, firm_slots = 4096, 2

    def new_cache(self, num_rows: int) -> KvRows:
        return KvRows(HostMemory(), 4, num_rows, 2, 16, np.dtype("f4"))  # 512 bytes a token

    def step(self, cache: Any, first: int, ids: Any, lengths: Any, index: Any, logits: bool) -> StepOutput:  # noqa: ARG002
        for i, length in enumerate(lengths.tolist()):
            for buffer in cache.buffers:
                buffer.array[first + i, :, length : length + ids.shape[1]] = ids[i, :, None]
        picked = np.take_along_axis(ids, index, 1)
        return StepOutput(picked % 250 + 1, np.full(index.shape, 0.5, np.float32))


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Talks that go on from earlier ones, whole or cut, some with a system message, some with a salt."""
    draw, budget = random.Random(5), 16 << 20
    store, backend = Prefixes(budget, Echo.firm_slots), Echo()
    systems = [[draw.randrange(1, 250) for _ in range(200)] for _ in range(5)]
    histories, most, over, checked = list(systems), 0, 0, 0
    begun = machine.resident()
    peak = begun
    for number in range(args.talks):
        history = draw.choice(histories)[: draw.randint(1, 1200)]
        prompt = [*history, *(draw.randrange(1, 250) for _ in range(draw.randint(1, 200)))]
        config = GenerationConfig(
            max_new_tokens=draw.randint(1, 40), eos_ids=(), cache_salt=draw.choice(("", "", "", "b"))
        )
        row = Row(0, prompt, config, (), stem=store.stem(config.cache_salt, (200,)))
        for events in run(Schedule(backend, 8, 0, Limits(1, prefill_tokens=256)), [row]):
            for event in events:
                if event.error is not None:
                    raise event.error
        histories = [*histories, row.tokens][-40:]
        most = max(most, store.stats.num_bytes)
        if number % 100 == 0:
            arrays = [array for entry in store._entries.values() for array in entry.saved.data]
            held = sum(array.nbytes for array in arrays)
            checked += 1
            over += held > budget or held != store.stats.num_bytes
            peak = max(peak, machine.resident())
    stats = store.stats
    return {
        "talks": args.talks,
        "budget": budget,
        "most_bytes": most,
        "held_otherwise": over,
        "checks": checked,
        "growth_of_process": peak - begun,
        "hits": stats.hits,
        "hit_tokens": stats.hit_tokens,
        "query_tokens": stats.query_tokens,
        "saved": stats.saved,
        "evicted": stats.evicted,
        "failed": stats.failed,
    }


def miss(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    texts, store = Texts(session, 3), session._prefixes
    store.clear()
    for _ in range(20):
        session.generate(texts.ids(args.history // 4), GenerationConfig(max_new_tokens=1))
    prompt = texts.ids(args.history)
    cache, seconds = session.backend.new_cache(1), []
    cache.reserve(64)
    zero = np.zeros((1, 1), np.int64)
    for _ in range(20):
        begun = perf_counter()
        stem = store.stem()
        assert stem is not None
        found = stem.recall(cache, 0, prompt, 256, session.backend.max_capacity)
        between = perf_counter()
        assert found == 0
        session.backend.step(cache, 0, zero, np.array([32]), zero, False)
        seconds.append((between - begun, perf_counter() - between))
    look, step = (median(values) for values in zip(*seconds, strict=True))
    return {"lookup_s": look, "step_s": step, "ratio": look / step, "entries": store.stats.entries}


def restarts(args: argparse.Namespace) -> dict[str, Any]:
    """Every round opens two sessions anew. The first of those with a directory fills it, and is not timed."""
    config = GenerationConfig(max_new_tokens=args.new, eos_ids=())
    times: dict[str, list[float]] = {"with": [], "without": []}
    answers, opening, cached = set(), [], 0
    with tempfile.TemporaryDirectory() as directory:
        for number in range(args.rounds + 1):
            for name in times:
                begun = perf_counter()
                session = Session.open(
                    args.bundle, threads=args.threads, cache_bytes=1 << 30,
                    prefix_dir=directory if name == "with" else None,
                )  # fmt: skip
                opened_in = perf_counter() - begun
                texts, _ = Texts(session, 4), session.cost
                system = texts.ids(args.history)
                session.generate(texts.ids(4), GenerationConfig(max_new_tokens=1))  # as a server warms up
                question = Texts(session, 100 + number).ids(args.question)
                done = session.generate([*system, *question], config)
                answers.add((number, done.token_ids))
                if name == "with":
                    session._prefixes.copies.wait()
                if number:
                    times[name].append(done.stats.time_to_first_token)
                    if name == "with":
                        cached = done.stats.cached_tokens
                        opening.append(opened_in)
                del session
    middle = {name: median(seconds) for name, seconds in times.items()}
    return {
        "first_token_s": middle,
        "ratio": middle["with"] / middle["without"],
        "cached_tokens": cached,
        "prompt_tokens": args.history + args.question,
        "same_answers": len(answers) == args.rounds + 1,
        "open_s": median(opening),
        "rounds": args.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    for name, default in (
        ("history", 1000), ("question", 30), ("rounds", 9), ("requests", 50), ("system", 800), ("batch", 8),
        ("new", 32), ("threads", 2), ("talks", 10_000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.bundle is None and args.only != ["memory"]:
        parser.error("a BUNDLE is needed for all but --only memory")
    sessions = opened(args) if {"turn", "requests", "miss"} & set(args.only) else {}
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "turn": lambda: turns(sessions, args),
        "requests": lambda: requests(sessions, args),
        "miss": lambda: miss(sessions["with"], args),
        "restart": lambda: restarts(args),
        "memory": lambda: memory(args),
    }
    settings = {k: v for k, v in vars(args).items() if isinstance(v, int)}
    results: dict[str, Any] = {"bundle": args.bundle.name if args.bundle else None, "settings": settings}
    for name in NAMES:
        if name in args.only:
            results[name] = works[name]()
            print(name, json.dumps(results[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def opened(args: argparse.Namespace) -> dict[str, Session]:
    sessions = {
        "with": Session.open(args.bundle, threads=args.threads, cache_bytes=1 << 30),
        "without": Session.open(args.bundle, threads=args.threads, cache_bytes=0),
    }
    sessions["without"].cost = sessions["with"].cost  # the same windows
    return sessions


if __name__ == "__main__":
    main()
