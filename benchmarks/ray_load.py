"""Replicas on Ray Serve compared with one process: answers, kills, throughput, and the gain of prefix
routing.

    python benchmarks/ray_load.py answers BUNDLE --requests 400  # once each, with the one process's text
    python benchmarks/ray_load.py kill BUNDLE --times 20  # a replica killed in mid-stream each time
    python benchmarks/ray_load.py head BUNDLE --times 2  # Ray's head killed, and started again, each time
    python benchmarks/ray_load.py throughput BUNDLE --rounds 3  # 2 replicas of 1 thread, 1 process of 2
    python benchmarks/ray_load.py routing BUNDLE --talks 20 --turns 6  # prefix hits with and without it

Each writes results/ray_COMMAND.json. `--python` is that of an environment with the extra ray (`make ray`
makes build/ray). Clients and servers share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from peers import machine
from serving import fleet, loops, prompts
from serving.cluster import Cluster
from serving.figures import table
from serving.loops import asker
from serving.server import Server, ours

RESULTS = Path(__file__).parent / "results"
BUILD = Path(__file__).resolve().parents[1] / "build"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def save(args: argparse.Namespace, value: dict[str, Any]) -> None:
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    about = {"command": " ".join(["python", "benchmarks/ray_load.py", *words])}
    path = args.json or RESULTS / f"ray_{args.command}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**about, "machine": machine.describe(2), **value}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def replicated(args: argparse.Namespace, *more: str) -> Server:
    rows = ("--max-rows", str(args.max_rows), "--max-waiting", "1024")
    words = fleet.command(args.python, args.bundle, str(args.replicas), 1, *rows, *more)
    return Server(words, Path(tempfile.gettempdir()) / "ray_load.log")


def single(args: argparse.Namespace, threads: int) -> Server:
    words = [args.python, *ours(args.bundle, threads, args.max_rows, 1024)[1:]]
    return Server(words, Path(tempfile.gettempdir()) / "ray_load_single.log")


def asked(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    return [{**body, "exact": True} for body in prompts.chats(["assistant", "chat"], count, args.most_tokens)]


def alone(args: argparse.Namespace, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of one process, each distinct request by itself."""
    distinct = {json.dumps(body): body for body in bodies}
    say(f"{len(distinct)} texts of one process")
    with single(args, 1) as server:
        told = asyncio.run(fleet.closed(server.port, list(distinct.values()), 1))
    texts = dict(zip(distinct, [each.text for each in told], strict=True))
    return [texts[json.dumps(body)] for body in bodies]


def answers(args: argparse.Namespace) -> None:
    """Every request by sixteen clients: answered once, with the text of the single process."""
    bodies = asked(args, args.requests)
    expected = alone(args, bodies)
    with replicated(args) as server:
        began = perf_counter()
        told = asyncio.run(fleet.closed(server.port, bodies, args.clients))
        seconds = perf_counter() - began
        tokens = asyncio.run(fleet.samples(server.port, "mars_generation_tokens_total"))
    value = fleet.verdict(told, expected) | {"seconds": round(seconds, 1), "tokens": sorted(tokens.values())}
    save(args, value)
    print(json.dumps(value))


def kill(args: argparse.Namespace) -> None:
    """Rounds of requests; in each one replica is killed, and has to come back."""
    bodies = asked(args, args.requests)
    expected, draw, rounds = alone(args, bodies), random.Random(args.seed), []
    with replicated(args) as server:
        asyncio.run(fleet.closed(server.port, bodies[: args.clients], args.clients))
        for number in range(args.times):
            wait = draw.uniform(0.1, args.within)
            round_ = fleet.kill_one(server.port, server.pid, bodies, args.clients, wait, draw)
            found = fleet.verdict(asyncio.run(round_), expected)
            found["back_s"] = round(asyncio.run(fleet.wait_for(server.port, args.replicas)), 1)
            rounds.append(found)
            say(f"kill {number + 1}: {found}")
        retries = sum(asyncio.run(fleet.samples(server.port, "mars_front_retries_total")).values())
    names = ("requests", "whole", "ended_by_an_error")
    value = {"kills": len(rounds), **{name: sum(r[name] for r in rounds) for name in names}}
    value |= {"wrong": sum(sum(r["wrong"].values()) for r in rounds), "retries": retries, "rounds": rounds}
    save(args, value)
    print(json.dumps({k: v for k, v in value.items() if k != "rounds"}))


def head(args: argparse.Namespace) -> None:
    """Rounds of requests; in each Ray's head is killed with all that runs there, and another one started. Its
    state is in a Redis (`redis-server` must be there); a replica killed afterwards shows that it has it.
    """
    bodies = asked(args, args.requests)
    expected, rounds = alone(args, bodies), []

    async def restart(cluster: Cluster) -> None:
        await asyncio.sleep(2)
        cluster.kill("head")
        await asyncio.sleep(args.away)
        await asyncio.to_thread(cluster.start_head)
        os.kill(lost := cluster.processes("worker", fleet.REPLICA)[0], signal.SIGKILL)
        began = perf_counter()
        while lost in (there := cluster.processes("worker", fleet.REPLICA)) or len(there) != args.replicas:
            assert perf_counter() - began < fleet.BACK, "the killed replica did not come back"
            await asyncio.sleep(0.2)
        await fleet.wait_for(cluster.port, args.replicas)

    def body(number: int) -> dict[str, Any]:
        return bodies[number % len(bodies)]

    with Cluster(args.python, args.replicas + 1, has_redis=True) as cluster:
        fronts = {"fronts": 2, "front_cpus": 0.5, "max_rows": args.max_rows}
        bundle = {"bundles": {"served": str(args.bundle)}, "replicas": args.replicas, "threads": 1}
        cluster.deploy({**bundle, **fronts})
        for number in range(args.times):
            told = asyncio.run(fleet.during(cluster.port, body, args.clients, restart(cluster)))
            said = fleet.verdict([each for _, each in told], [expected[n % len(bodies)] for n, _ in told])
            rounds.append(said)
            say(f"head {number + 1}: {said}")
    names = ("requests", "whole", "ended_by_an_error")
    value = {"heads": len(rounds), **{name: sum(r[name] for r in rounds) for name in names}}
    value |= {"wrong": sum(sum(r["wrong"].values()) for r in rounds), "rounds": rounds}
    save(args, value)
    print(json.dumps({k: v for k, v in value.items() if k != "rounds"}))


def throughput(args: argparse.Namespace) -> None:
    """The same closed loop in turns: replicas of one thread, and one process with as many threads."""
    bodies, rows = asked(args, args.requests), []
    kinds = {f"{args.replicas} replicas x 1 thread": lambda: replicated(args)}
    kinds[f"1 process x {args.replicas} threads"] = lambda: single(args, args.replicas)
    for number in range(args.rounds):
        for name, start in kinds.items():
            with start() as server:
                ask = asker(server.port, {})
                asyncio.run(loops.closed(ask, bodies[: args.clients], args.clients))  # warm
                outcome = asyncio.run(loops.closed(ask, bodies, args.clients))
                rows.append({"name": name, "round": number + 1, **outcome.figures()})
                say(f"{name}, round {number + 1}: {rows[-1]['tokens_per_second']} tokens/s")
    rates = {n: statistics.median(r["tokens_per_second"] for r in rows if r["name"] == n) for n in kinds}
    save(args, {"tokens_per_second": rates, "rows": rows})
    print(
        table(
            rows,
            ("name", "round", "requests_per_second", "tokens_per_second", "latency_s.p50", "latency_s.p95"),
        )
    )


def routing(args: argparse.Namespace) -> None:
    """Talks of several turns, with pauses as people make them (in a closed loop the replica that has just
    answered is the idler one, and gets the next turn anyway); prompt tokens that were in the prefix store.
    """
    system = "You are a helpful assistant of a shop. Answer in one sentence, and be friendly to everybody."
    draw = random.Random(args.seed)

    def question(talk: int, turn: int) -> str:
        return f"Question {turn} of talk {talk}: what is {draw.randrange(99)} and {draw.randrange(99)}?"

    turns = [[question(talk, turn) for turn in range(args.turns)] for talk in range(args.talks)]
    rows = []
    for name in ("prefix", "even"):
        with replicated(args, "--routing", name) as server:

            async def talks(port: int = server.port) -> list[fleet.Told]:
                pauses = random.Random(args.seed + 1)
                said = await asyncio.gather(
                    *(fleet.talk(port, system, own, args.most_tokens, args.pause, pauses) for own in turns)
                )
                return [told for each in said for told in each]

            told = asyncio.run(talks())
            routes = asyncio.run(fleet.samples(server.port, "mars_front_routes_total"))
        assert all(each.status == 200 and not each.code for each in told), "not all were answered"
        prompt, cached = sum(t.prompt for t in told), sum(t.cached for t in told)
        row = {"routing": name, "requests": len(told), "prompt_tokens": prompt, "cached_tokens": cached}
        rows.append(row | {"hit_share": round(cached / prompt, 4), "routes": routes})
        say(f"{rows[-1]}")
    save(args, {"rows": rows})
    print(table(rows, ("routing", "requests", "prompt_tokens", "cached_tokens", "hit_share")))


COMMANDS = {"answers": answers, "kill": kill, "head": head, "throughput": throughput, "routing": routing}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("bundle", type=Path)
    found = BUILD / "ray" / "bin" / "python"
    parser.add_argument("--python", default=str(found) if found.exists() else sys.executable)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--most-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--within", type=float, default=5.0, help="seconds in which a replica is killed")
    parser.add_argument("--away", type=float, default=8.0, help="seconds without a head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--talks", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds before each question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.bundle = args.bundle.resolve()
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
