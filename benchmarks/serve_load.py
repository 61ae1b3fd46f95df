"""Load on `mars-export serve`: an open loop, and llama.cpp's server beside it.

    python benchmarks/serve_load.py open BUNDLE --fixed exact tau=0.95
    python benchmarks/serve_load.py peers --llama-server LLAMA_SERVER --clients 1 4 16

Each starts its server, sends requests of many clients over HTTP, and writes results/serve_COMMAND.json.
Clients and server share the machine. `peers` uses the bundle, GGUF files and environment of
benchmarks/peers.py (run `python benchmarks/peers.py --setup llama-cpp` first), and creates what is absent.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers import catalog, machine, models
from peers.machine import say
from serving import loops, prompts
from serving.figures import table
from serving.loops import Outcome, asker
from serving.server import Server, llama_server, ours

RESULTS = Path(__file__).parent / "results"
LOOP_COLUMNS = (
    "name", "requests_per_second", "tokens_per_second", "latency_s.p50", "latency_s.p95", "latency_s.p99",
)  # fmt: skip


def save(args: argparse.Namespace, value: dict[str, Any]) -> None:
    path = args.json or RESULTS / f"serve_{args.command}.json"
    machine.save(path, {"about": machine.about(args.threads), **value})
    say(f"written: {path}")


def start(args: argparse.Namespace) -> Server:
    command = ours(args.bundle, args.threads, args.max_rows, args.max_waiting)
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


# --- open ---


def opened(args: argparse.Namespace) -> None:
    """Capacity by a closed loop of the first setting, then arrivals at multiples of it, for each setting."""
    settings = [(words, fields(words)) for words in args.fixed]
    with start(args) as server:
        ask = asker(server.port, settings[0][1])
        found = asyncio.run(loops.closed(ask, requests(args, args.capacity_requests), args.max_rows * 2))
        capacity = found.figures()["requests_per_second"]
    say(f"capacity of {settings[0][0]}: {capacity} requests/s")
    rows: list[dict[str, Any]] = []
    for name, body in settings:
        with start(args) as server:
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
        "name", "multiple", "offered", "goodput", "latency_s.p50", "latency_s.p95", "latency_s.p99",
        "refused",
    )  # fmt: skip
    print(table(rows, columns))


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
    merged = catalog.merged(work)
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
        gguf = catalog.gguf(work, venvs, kind)
        file = gguf.model / gguf.options["file"]
        if not file.exists():
            problem = models.make(merged, work) or models.why_absent(gguf, venvs) or models.make(gguf, work)
            if problem:
                absent[gguf.name] = problem
                say(f"{gguf.name}: absent: {problem}")
                continue
        serving = llama_server(args.llama_server, file, args.threads, catalog.CONTEXT, max(args.clients))
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

    made = command("open", opened, "Poisson arrivals at multiples of capacity")
    made.add_argument(
        "--fixed", nargs="+", default=["exact"], help="settings: exact, one-token, tau=N, profile=NAME"
    )
    made.add_argument("--multiples", type=float, nargs="+", default=[0.5, 0.75, 1.0, 1.25, 1.5])
    made.add_argument("--seconds", type=float, default=120, help="of arrivals for each point")
    made.add_argument("--slo", type=float, default=5.0, help="seconds within which an answer is good")
    made.add_argument("--capacity-requests", type=int, default=96)

    made = command("peers", compared, "beside llama.cpp's server")
    made.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server")
    made.add_argument("--precision", choices=catalog.PRECISIONS["cpu"], default="w8a8")
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
