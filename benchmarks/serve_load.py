"""Load on `mars-export serve`, with llama.cpp's server beside it.

    python benchmarks/serve_load.py peers --llama-server LLAMA_SERVER --clients 1 4 16

It starts the servers, sends requests of many clients over HTTP, and writes results/serve_peers.json. Clients
and servers share the machine. It uses the bundle, GGUF files and environment of benchmarks/peers.py (run
`python benchmarks/peers.py --setup llama-cpp` first), and creates what is absent.
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
    about = {"about": machine.about(args.threads), "rounds": args.rounds}
    machine.save(args.json, {**about, "absent": absent, "rows": rows})
    say(f"written: {args.json}")
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
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("command", choices=["peers"], help="beside llama.cpp's server")
    made.add_argument("--bundle", type=Path, help="ours; otherwise it is made under --work")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--max-rows", type=int, default=8)
    made.add_argument("--max-waiting", type=int, default=256)
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--tasks", nargs="+", choices=prompts.TASKS, default=list(prompts.TASKS))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--logs", type=Path, default=Path("build/logs"))
    made.add_argument("--json", type=Path, default=RESULTS / "serve_peers.json")
    made.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server")
    made.add_argument("--precision", choices=catalog.PRECISIONS["cpu"], default="w8a8")
    made.add_argument(
        "--fixed", nargs="+", default=["exact", "tau=0.95"], help="exact, one-token, tau=N, profile=NAME"
    )
    made.add_argument("--kinds", nargs="*", choices=("q8_0", "q4_0"), default=["q8_0", "q4_0"])
    made.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--each", type=int, default=16, help="requests of each client")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--venvs", type=Path, default=Path("build/peers/venvs"))
    made.add_argument("--work", type=Path, default=Path("build/peers"))
    return made


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for setting in args.fixed:
        fields(setting)
    compared(args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("\ninterrupted")
        sys.exit(130)
