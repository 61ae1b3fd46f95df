"""A plan against the real thing: the same arrivals of the same requests, simulated and sent to real servers.

    python benchmarks/plan_check.py BUNDLE --task assistant --mode exact --multiples 0.3 0.5 0.7
    python benchmarks/plan_check.py BUNDLE --replicas 2 --threads 1 --batch 4

Each multiple is of the capacity that the simulation finds. Replicas take turns and share this machine, so
replicas x threads should not pass its cores. Clients share it, too. A plan is for machines of their own; here
replicas share the memory, whose speed is what a small step costs. So with several the rows are recorded
twice, alone and beside others that never wait, and a step costs as much in between as the others are busy.
What steps cost is measured anew, in a cache folder that the servers use, too.

Writes results/plan_check.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mars_export.calibration.plan import arrivals
from mars_export.calibration.plan.fleet import Fleet, Run
from mars_export.calibration.plan.options import PlanOptions, modes_of
from mars_export.calibration.plan.plan import PlanRequest, recorded
from mars_export.calibration.rows import make_plan
from mars_export.runtime import MarsError
from mars_export.runtime.decode.cost import Cost
from serve_load import RESULTS, save, say
from serving import loops, wire
from serving.figures import table
from serving.server import Server, ours
from serving.wire import Answer

COLUMNS = (
    "multiple", "offered", "requests", "lost", "busy_plan", "busy_real", "p50_plan", "p50_real", "p95_plan",
    "p95_real", "p95_off",
)  # fmt: skip


MIXES = 3  # times that a plan is made again with what the one before says of the others
# A replica that never waits, until it is ended.
BUSY = """
import sys
from mars_export.runtime import GenerationConfig, Session
session = Session.open(sys.argv[1], threads=int(sys.argv[2]))
mask = session.bundle.manifest.tokens.mask
print("busy", flush=True)
while True:
    session.generate([1 if mask == 0 else 0] * 64, GenerationConfig(max_new_tokens=64))
"""


@contextmanager
def neighbours(args: argparse.Namespace, count: int) -> Iterator[None]:
    """So many other replicas, as busy as they may be."""
    words = [sys.executable, "-c", BUSY, str(args.bundle), str(args.threads)]
    busy = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for each in busy:
            assert each.stdout is not None
            if each.stdout.readline().strip() != "busy":
                raise SystemExit("error: a replica to measure beside did not start")
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


async def ask(request: dict[str, Any]) -> Answer:
    """Of the server whose port stands in the request."""
    body = {name: value for name, value in request.items() if name != "port"}
    return await wire.stream(request["port"], {"stream_options": {"include_usage": True}, **body})


@dataclass(frozen=True)
class Known:
    """What was recorded of the task, and the requests that it is asked by."""

    fleet: Fleet
    chats: list[dict[str, Any]]
    mode: str
    task: str


def measured(args: argparse.Namespace, count: int) -> Known:
    """Recorded beside `count` other replicas, with a cost table of its own."""
    where = f"{args.bundle.stem}-{args.threads}x{args.batch}-beside-{count}"
    cache = (args.logs / "cache" / where).resolve()
    if args.force:
        shutil.rmtree(cache, ignore_errors=True)
    os.environ["MARS_EXPORT_CACHE"] = str(cache)
    options = PlanOptions(p95=1.0, rate=1.0, modes=(args.mode,), batches=(args.batch,), limit=args.limit)
    request = PlanRequest(
        args.bundle, args.task, args.output / where, threads=args.threads, force=args.force, options=options
    )
    session = request.open()
    (mode,) = modes_of(session, options.modes)
    rows = make_plan(session, request.rows(), options.limit)
    if any(not task.messages for task in rows.tasks):
        raise SystemExit("error: the check asks chats; give a task whose rows have messages")
    with neighbours(args, count):
        basis = recorded(request, session, rows, lambda phase, done, total: None)
    fleet = basis.fleet(session, mode, args.batch, options.prefill_tokens)
    fields: dict[str, Any] = {"exact": True} if mode.exact else {"tau": mode.tau, "metric": mode.metric}
    chats = [{"messages": task.source, "max_tokens": task.max_new_tokens, **fields} for task in rows.tasks]
    say(f"beside {count}: a step of a block costs {cost(fleet, fleet.machine.block) * 1e3:.3g} ms")
    return Known(fleet, chats, mode.name, request.task_name)


def cost(fleet: Fleet, positions: int) -> float:
    """Seconds of a step, with what the loop adds."""
    return fleet.machine.cost.of(positions) * fleet.machine.slower


def between(alone: Fleet, beside: Fleet, busy: float) -> Fleet:
    """A fleet whose steps cost as much as beside others that are busy for that share of the time."""
    sizes = [size for size, _ in alone.machine.cost.points]
    seconds = [cost(alone, n) + busy * (cost(beside, n) - cost(alone, n)) for n in sizes]
    machine = replace(alone.machine, cost=Cost(tuple(zip(sizes, seconds, strict=True))), slower=1.0)
    return Fleet(machine, alone.mode, alone.works)


def planned(alone: Fleet, beside: Fleet, num_replicas: int, times: Sequence[float], order: list[int]) -> Run:
    """What the requests would take: others are as busy as the run says in which they are as busy."""
    run = alone.run(times, order, num_replicas, "turns")
    for _ in range(MIXES if num_replicas > 1 else 0):
        run = between(alone, beside, run.busy).run(times, order, num_replicas, "turns")
    return run


def check(args: argparse.Namespace) -> None:
    beside = measured(args, args.replicas - 1)
    known = measured(args, 0) if args.replicas > 1 else beside
    alone, chats = known.fleet, known.chats
    capacity = beside.fleet.capacity(arrivals.order(len(alone.works), 512, args.seed)) * args.replicas
    say(f"{known.mode}: {capacity:.3g} requests/s of {args.replicas}")
    made: list[dict[str, Any]] = []
    with ExitStack() as stack:
        # Without saved prefixes: a plan reads each prompt from its beginning, and these come again and again.
        command = ours(args.bundle, args.threads, args.batch, 4096, "--cache-bytes", "0")
        servers = [
            stack.enter_context(Server(command, args.logs / f"plan-check-{i}.log"))
            for i in range(args.replicas)
        ]
        ports = [server.port for server in servers]
        warm = [{**chat, "port": port} for chat in chats[: 2 * args.batch] for port in ports]
        asyncio.run(loops.closed(ask, warm, args.replicas * args.batch))
        for number, multiple in enumerate(args.multiples):
            rate, seed = capacity * multiple, args.seed + number
            count = max(args.least, round(rate * args.seconds))
            order = arrivals.order(len(chats), count, seed)
            times = arrivals.poisson(rate, count, seed)
            run = planned(alone, beside.fleet, args.replicas, times, order)
            asked = [{**chats[which], "port": ports[i % len(ports)]} for i, which in enumerate(order)]
            before = sum(server.cpu_seconds for server in servers)
            outcome = asyncio.run(loops.opened(ask, asked, rate, seed))
            used = sum(server.cpu_seconds for server in servers) - before
            figures = outcome.figures()
            real = figures["latency_s"]
            p50, p95, _ = run.percentiles
            made.append(
                {
                    "multiple": multiple,
                    "offered": round(rate, 3),
                    "requests": count,
                    "lost": count - figures["whole"],
                    "failed": figures["failed"] | figures["refused"],
                    "busy_plan": round(run.busy, 3),
                    "busy_real": round(used / (args.replicas * args.threads * outcome.seconds), 3),
                    "p50_plan": round(p50, 4),
                    "p50_real": real.get("p50"),
                    "p95_plan": round(p95, 4),
                    "p95_real": real.get("p95"),
                    "p95_off": round(p95 / real["p95"] - 1, 3) if real.get("p95") else None,
                }
            )
            say(f"{multiple:g} of capacity: p95 {p95:.3g} s planned, {real.get('p95')} s measured")
    value: dict[str, Any] = {"mode": known.mode, "task": known.task, "capacity": capacity, "rows": made}
    value |= {"batch": args.batch, "replicas": args.replicas, "threads": args.threads}
    for name, fleet in (("alone", alone), ("beside", beside.fleet)):
        value[name] = {"slower": fleet.machine.slower, "cost": fleet.machine.cost.points}
    args.json = args.json or RESULTS / "plan_check.json"
    save(args, value)
    print(table(made, COLUMNS))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("bundle", type=Path)
    made.add_argument("--task", default="assistant")
    made.add_argument("--mode", default="exact", help="exact, one-token, tau=N or profile=NAME")
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--replicas", type=int, default=1)
    made.add_argument("--threads", type=int, default=2, help="of each replica")
    made.add_argument("--multiples", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    made.add_argument("--seconds", type=float, default=45, help="of arrivals for each multiple")
    made.add_argument("--least", type=int, default=60, help="requests for each multiple")
    made.add_argument("--limit", type=int, default=48, help="rows of the task")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--force", action="store_true", help="record anew: what was recorded was on a busy machine"
    )
    made.add_argument("--output", type=Path, default=Path("build/plan-check"), help="of what was recorded")
    made.add_argument("--logs", type=Path, default=Path("build/logs"))
    made.add_argument("--json", type=Path, help="default: results/plan_check.json")
    return made


def main(argv: list[str] | None = None) -> None:
    check(parser().parse_args(argv))


if __name__ == "__main__":
    try:
        main()
    except MarsError as error:
        sys.exit(f"error: {error}")
