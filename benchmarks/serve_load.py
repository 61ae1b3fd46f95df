"""Load on `mars-export serve`: closed and open loops, a soak, the cost of HTTP, and llama.cpp's server.

    python benchmarks/serve_load.py closed BUNDLE --clients 64 --each 50    # no error, no growth, the texts
    python benchmarks/serve_load.py open BUNDLE --fixed exact tau=0.95 --adaptive exact,assistant@0.02
    python benchmarks/serve_load.py soak BUNDLE --minutes 40 --requests 20000      # Ctrl-C ends it cleanly
    python benchmarks/serve_load.py overhead BUNDLE                                # HTTP over the Batcher
    python benchmarks/serve_load.py peers --clients 1 4 16                         # beside llama.cpp's

Each starts its server, sends requests of many clients over HTTP, and writes results/serve_COMMAND.json.
Clients and server share the machine. `peers` uses the bundle, GGUF files and environment of
benchmarks/peers.py (run `python benchmarks/peers.py --setup llama-cpp` first), and creates what is absent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from mars_export import Batcher, GenerationConfig, Limits, Session
from peers import catalog, machine, models
from peers.catalog import Program
from serving import loops, prompts, soak
from serving.figures import growth, table
from serving.habits import HABITS, PROTOCOLS
from serving.loops import Outcome, asker
from serving.server import Server, llama, llama_server, ours
from serving.wire import Answer

RESULTS = Path(__file__).parent / "results"
LOOP_COLUMNS = (
    "name",
    "requests_per_second",
    "tokens_per_second",
    "latency_s.p50",
    "latency_s.p95",
    "latency_s.p99",
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def words() -> list[str]:
    """The arguments without the paths of this machine."""
    return [Path(word).name if os.sep in word else word for word in sys.argv[1:]]


def save(args: argparse.Namespace, value: dict[str, Any]) -> None:
    about = {"command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words()])}
    about["machine"] = machine.describe(args.threads)
    path = args.json or RESULTS / f"serve_{args.command}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"about": about, **value}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    say(f"written: {path}")


def start(args: argparse.Namespace, *more: str) -> Server:
    command = ours(args.bundle, args.threads, args.max_rows, args.max_waiting, *more)
    return Server(command, args.logs / f"serve-{args.command}.log")


def requests(args: argparse.Namespace, count: int, shift: int = 0) -> list[dict[str, Any]]:
    """With another `shift` others come first: a server has not read them just before."""
    return prompts.chats(args.tasks, count, args.max_tokens, args.seed + shift)


def fields(words: str) -> dict[str, Any]:
    """Of a setting as it is written: `exact`, `one-token`, `tau=0.95`, `profile=NAME`."""
    name, _, value = words.partition("=")
    if words == "exact":
        return {"exact": True}
    if words == "one-token":
        return {"tau": 1}
    if name == "tau" and value:
        return {"tau": float(value)}
    if name == "profile" and value:
        return {"profile": value}
    raise argparse.ArgumentTypeError(f"{words!r} is not exact, one-token, tau=NUMBER or profile=NAME")


# --- closed ---


def closed(args: argparse.Namespace) -> None:
    """N clients, M requests each, in exact mode; every text is compared with that of the request alone."""
    asked = requests(args, args.clients * args.each)
    distinct = {json.dumps(request): request for request in asked}
    if args.check < len(distinct):
        distinct = dict(list(distinct.items())[: args.check])
    exact = {"exact": True}
    with start(args) as server:
        say(f"{len(distinct)} texts alone")
        first = asyncio.run(loops.closed(asker(server.port, exact), list(distinct.values()), 1))
        alone = dict(
            zip(distinct, [a.text for _, a in sorted(first.answers, key=lambda x: x[0])], strict=True)
        )
        rounds, memory, times, began = [], [server.memory], [0.0], perf_counter()
        pieces = max(1, args.each // args.rounds) * args.clients
        for at in range(0, len(asked), pieces):
            piece = asked[at : at + pieces]
            outcome = asyncio.run(loops.closed(asker(server.port, exact), piece, args.clients))
            differ = [n for n, a in outcome.answers if alone.get(json.dumps(piece[n]), a.text) != a.text]
            rounds.append(outcome.figures() | {"name": f"round {len(rounds) + 1}", "differ": len(differ)})
            memory.append(server.memory)
            times.append(perf_counter() - began)
    value = {"clients": args.clients, "rounds": rounds, "memory_mib": [round(m / 2**20, 1) for m in memory]}
    value |= {"memory": growth(times, memory), "compared_texts": len(distinct)}
    save(args, value)
    print(table(rounds, (*LOOP_COLUMNS, "failed", "refused", "differ")))
    print(f"memory, MiB: {value['memory_mib']}")


# --- open ---


def opened(args: argparse.Namespace) -> None:
    """Capacity by a closed loop of the first setting, then arrivals at multiples of it, for each setting."""
    settings = [(words, fields(words), ()) for words in args.fixed]
    if args.adaptive:
        settings.append((f"adaptive {args.adaptive}", {}, ("--adaptive", args.adaptive)))
    with start(args) as server:
        ask = asker(server.port, settings[0][1])
        found = asyncio.run(loops.closed(ask, requests(args, args.capacity_requests), args.max_rows * 2))
        capacity = found.figures()["requests_per_second"]
    say(f"capacity of {settings[0][0]}: {capacity} requests/s")
    rows: list[dict[str, Any]] = []
    for name, body, more in settings:
        with start(args, *more) as server:
            ask = asker(server.port, body)
            asyncio.run(loops.closed(ask, requests(args, args.max_rows), args.max_rows))  # warm
            for number, multiple in enumerate(args.multiples):
                rate = capacity * multiple
                asked = requests(args, max(2, round(rate * args.seconds)), number + 1)
                outcome = asyncio.run(loops.opened(ask, asked, rate, args.seed))
                figures = outcome.figures(args.slo)
                rows.append({"name": name, "multiple": multiple, "offered": round(rate, 3), **figures})
                say(f"{name}, {multiple:g} of capacity: p95 {figures['latency_s'].get('p95')} s")
    save(args, {"capacity": capacity, "of": settings[0][0], "slo_s": args.slo, "rows": rows})
    columns = (
        "name",
        "multiple",
        "offered",
        "goodput",
        "latency_s.p50",
        "latency_s.p95",
        "latency_s.p99",
        "refused",
    )
    print(table(rows, columns))


# --- soak ---


def soaked(args: argparse.Namespace) -> None:
    with start(args, "--queue-timeout", "600") as server:
        say(f"{args.pool} texts alone")
        alone, habits = (soak.contents, PROTOCOLS) if args.mix == "protocols" else (soak.references, HABITS)
        asked = asyncio.run(alone(server.port, requests(args, args.pool)))
        run = soak.Soak(
            server, asked, habits, args.clients, args.requests, args.minutes * 60, args.seed, args.journal,
            args.every, args.rate,
        )  # fmt: skip
        value = asyncio.run(run.run())
    save(args, value)
    print(json.dumps({k: v for k, v in value.items() if k != "outcomes"}, indent=1))
    if value["wrong"] or not value["server_alive"]:
        sys.exit(1)


# --- overhead ---


async def _batched(batcher: Batcher, asked: list[dict[str, Any]], num_clients: int) -> Outcome:
    """The closed loop of `loops.closed`, without HTTP."""

    async def ask(request: dict[str, Any]) -> Answer:
        began, answer = perf_counter(), Answer(200)
        config = GenerationConfig(max_new_tokens=request["max_tokens"])
        stream = await batcher.asubmit(request["messages"], config, wait=None)
        async for event in stream:
            if answer.first is None:
                answer.first = perf_counter() - began
            answer.text += event.text
        answer.tokens, answer.seconds = stream.stats.tokens, perf_counter() - began
        return answer

    return await loops.closed(ask, asked, num_clients)


def overhead(args: argparse.Namespace) -> None:
    """The same requests in turns: to a Batcher in this process, and to a server with the same settings."""
    asked = requests(args, args.clients * args.each)
    limits = Limits(max_rows=args.max_rows, max_waiting=args.max_waiting)
    rounds: dict[str, list[dict[str, Any]]] = {"batcher": [], "http": []}
    texts: dict[str, list[str]] = {}
    session = Session.open(str(args.bundle), device="cpu", threads=args.threads)
    with start(args) as server, Batcher(session, limits) as batcher:
        ways = {
            "batcher": lambda some: _batched(batcher, some, args.clients),
            "http": lambda some: loops.closed(asker(server.port, {"exact": True}), some, args.clients),
        }
        for way in ways.values():
            asyncio.run(way(asked[: args.clients]))  # warm
        for number in range(args.rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                outcome = asyncio.run(ways[name](asked))
                rounds[name].append(outcome.figures())
                texts[name] = [a.text for _, a in sorted(outcome.answers, key=lambda x: x[0])]
    speeds = {name: statistics.median(r["tokens_per_second"] for r in made) for name, made in rounds.items()}
    value: dict[str, Any] = {"clients": args.clients, "rounds": rounds, "tokens_per_second": speeds}
    value["overhead"] = round(1 - speeds["http"] / speeds["batcher"], 4)
    value["same_texts"] = texts["http"] == texts["batcher"]
    save(args, value)
    less = f"{value['overhead']:.1%} less; same texts: {value['same_texts']}"
    print(f"Batcher {speeds['batcher']:.1f} tokens/s, HTTP {speeds['http']:.1f}: {less}")


# --- peers ---


def compared(args: argparse.Namespace) -> None:
    """All servers are up, and one at a time is asked: at every number of clients, in rounds, each round with
    other chats that are the same for all servers.
    """
    venvs, work = args.venvs.absolute(), args.work.absolute()
    (work / "logs").mkdir(parents=True, exist_ok=True)
    commands, absent = _servers(args, venvs, work)
    found: dict[tuple[str, int], Outcome] = {}
    with ExitStack() as running:
        asks = {}
        for name, (command, probe, body) in commands.items():
            log = args.logs / f"serve-peers-{name.replace(' ', '-')}.log"
            server = running.enter_context(Server(command, log, probe))
            asks[name] = asker(server.port, body)
            asyncio.run(loops.closed(asks[name], requests(args, 2, -1), 1))  # warm
        for number in range(args.rounds):
            for clients in args.clients:
                asked = requests(args, clients * args.each, 100 * number + clients)
                for name in list(asks)[:: 1 if number % 2 else -1]:
                    outcome = asyncio.run(loops.closed(asks[name], asked, clients))
                    known = found.setdefault((name, clients), Outcome())
                    known.answers += outcome.answers
                    known.failures += outcome.failures
                    known.seconds += outcome.seconds
            say(f"round {number + 1}")
    rows = [
        {"name": name, "clients": clients, **found[name, clients].figures()}
        for clients in args.clients
        for name in asks
    ]
    save(args, {"rounds": args.rounds, "absent": absent, "rows": rows})
    first = ("first_token_s.p50", "first_token_s.p95")
    print(table(rows, ("clients", *LOOP_COLUMNS[:-1], *first, "requests", "failed")))


def _servers(
    args: argparse.Namespace, venvs: Path, work: Path
) -> tuple[dict[str, tuple[list[str], str, dict[str, Any]]], dict[str, str]]:
    """By name the command, the path that answers when it is ready, and the fields of requests; and why others
    are absent.
    """
    merged = Program("merged", None, "", work / "merged", (sys.executable, "-m", "peers.merged", "{out}"))
    absent: dict[str, str] = {}
    commands: dict[str, tuple[list[str], str, dict[str, Any]]] = {}
    if args.bundle is None:
        args.bundle = work / f"{args.precision}.bundle"
    known = {p.name: p for p in catalog.programs(work, venvs, None)}
    own = known[f"ours {args.precision}"]
    if not args.bundle.exists() and (problem := models.make(replace(own, model=args.bundle), work)):
        sys.exit(f"error: {problem}")
    command = ours(args.bundle, args.threads, args.max_rows, args.max_waiting)
    for setting in args.fixed:
        commands[f"mars-export {args.precision} {setting}"] = (command, "/health", fields(setting))
    greedy = {"temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0}
    for kind in args.kinds:
        gguf = catalog.served_gguf(work, venvs, kind)
        file = gguf.model / gguf.options["file"]
        if not file.exists():
            problem = models.make(merged, work) or models.why_absent(gguf, venvs) or models.make(gguf, work)
            if problem:
                absent[gguf.name] = problem
                say(f"{gguf.name}: absent: {problem}")
                continue
        if args.llama_server is None:
            serving = llama(catalog.python_of(venvs, "llama-cpp"), file, args.threads, catalog.CONTEXT)
            commands[f"llama-cpp-python {kind}"] = (serving, "/v1/models", greedy)
        else:
            slots = max(args.clients)
            serving = llama_server(args.llama_server, file, args.threads, catalog.CONTEXT, slots)
            commands[f"llama-server {kind}"] = (serving, "/health", greedy)
    return commands, absent


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, words: str, **defaults: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words)
        made.set_defaults(run=run)
        if name == "peers":
            made.add_argument("--bundle", type=Path, help="ours; otherwise it is made under --work")
        else:
            made.add_argument("bundle", type=Path)
        made.add_argument("--threads", type=int, default=2)
        made.add_argument("--max-rows", type=int, default=defaults.get("max_rows", 8))
        made.add_argument("--max-waiting", type=int, default=256)
        made.add_argument("--max-tokens", type=int, default=defaults.get("max_tokens", 64))
        made.add_argument("--tasks", nargs="+", choices=prompts.TASKS, default=list(prompts.TASKS))
        made.add_argument("--seed", type=int, default=0)
        made.add_argument("--logs", type=Path, default=Path("build/logs"))
        made.add_argument("--json", type=Path, help=f"default: results/serve_{name}.json")
        return made

    made = command("closed", closed, "N clients, M requests each")
    made.add_argument("--clients", type=int, default=64)
    made.add_argument("--each", type=int, default=50)
    made.add_argument("--rounds", type=int, default=10, help="between which memory is read")
    made.add_argument("--check", type=int, default=200, help="texts that are also asked for alone")

    made = command("open", opened, "Poisson arrivals at multiples of capacity")
    made.add_argument(
        "--fixed", nargs="+", default=["exact"], help="settings: exact, one-token, tau=N, profile=NAME"
    )
    made.add_argument("--adaptive", default="", help="also a server with --adaptive LIST")
    made.add_argument("--multiples", type=float, nargs="+", default=[0.5, 0.75, 1.0, 1.25, 1.5])
    made.add_argument("--seconds", type=float, default=120, help="of arrivals for each point")
    made.add_argument("--slo", type=float, default=5.0, help="seconds within which an answer is good")
    made.add_argument("--capacity-requests", type=int, default=96)

    made = command("soak", soaked, "every habit, for long", max_tokens=32)
    made.add_argument("--clients", type=int, default=32)
    made.add_argument("--requests", type=int, default=20_000)
    made.add_argument("--minutes", type=float, default=40)
    made.add_argument(
        "--mix",
        choices=("habits", "protocols"),
        default="habits",
        help="clients good and bad, or chat completions, responses and messages with tools, schemas, several"
        " answers and clients that leave",
    )
    made.add_argument("--rate", type=float, default=0, help="requests a second of all clients; 0: no limit")
    made.add_argument("--pool", type=int, default=96, help="requests whose texts alone are known")
    made.add_argument("--every", type=float, default=10, help="seconds between lines of the journal")
    made.add_argument("--journal", type=Path, default=Path("build/serve-soak.jsonl"))

    made = command("overhead", overhead, "HTTP over the Batcher alone")
    made.add_argument("--clients", type=int, default=8)
    made.add_argument("--each", type=int, default=8)
    made.add_argument("--rounds", type=int, default=5)

    made = command("peers", compared, "beside llama.cpp's server")
    made.add_argument("--llama-server", type=Path, help="llama.cpp's own, in place of llama-cpp-python's")
    made.add_argument("--precision", choices=catalog.PRECISIONS, default="w8a8")
    made.add_argument("--fixed", nargs="+", default=["exact", "tau=0.95"])
    made.add_argument("--kinds", nargs="*", choices=("q8_0", "q4_0"), default=["q8_0", "q4_0"])
    made.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--each", type=int, default=16, help="requests of each client")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--venvs", type=Path, default=Path("build/peers/venvs"))
    made.add_argument("--work", type=Path, default=Path("build/peers"))
    return top


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for setting in getattr(args, "fixed", ()):
        fields(setting)
    args.run(args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("\ninterrupted")
        sys.exit(130)
