"""A plan against the real thing: the same arrivals of the same requests, simulated and sent to real servers.

    python benchmarks/plan_check.py BUNDLE --task assistant --mode exact --multiples 0.3 0.6 0.85
    python benchmarks/plan_check.py BUNDLE --replicas 2 --threads 1 --batch 4

Each multiple is of the capacity that the simulation finds. Replicas take turns and share this machine, so
replicas x threads should not pass its cores. Clients share it, too. Writes results/plan_check.json.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mars_export.calibration.plan import arrivals
from mars_export.calibration.plan.options import PlanOptions, modes_of
from mars_export.calibration.plan.plan import PlanRequest, recorded
from mars_export.calibration.rows import make_plan
from serve_load import RESULTS, save, say
from serving import loops, wire
from serving.figures import table
from serving.server import Server, ours
from serving.wire import Answer

COLUMNS = (
    "multiple", "offered", "requests", "lost", "p50_plan", "p50_real", "p95_plan", "p95_real", "p95_off",
)  # fmt: skip


async def ask(request: dict[str, Any]) -> Answer:
    """Of the server whose port stands in the request."""
    body = {name: value for name, value in request.items() if name != "port"}
    return await wire.stream(request["port"], {"stream_options": {"include_usage": True}, **body})


def check(args: argparse.Namespace) -> None:
    options = PlanOptions(p95=1.0, rate=1.0, modes=(args.mode,), batches=(args.batch,), limit=args.limit)
    request = PlanRequest(
        args.bundle, args.task, args.output, threads=args.threads, force=args.force, options=options
    )
    session = request.open()
    (mode,) = modes_of(session, options.modes)
    rows = make_plan(session, request.rows(), options.limit)
    if any(not task.messages for task in rows.tasks):
        raise SystemExit("error: the check asks chats; give a task whose rows have messages")
    basis = recorded(request, session, rows, lambda phase, done, total: None)
    fleet = basis.fleet(session, mode, args.batch, options.prefill_tokens)
    capacity = fleet.capacity(arrivals.order(len(fleet.works), 512, args.seed)) * args.replicas
    say(f"{mode.name}: {capacity:.3g} requests/s of {args.replicas}; steps cost {basis.slower:.2f} x table")
    fields: dict[str, Any] = {"exact": True} if mode.exact else {"tau": mode.tau, "metric": mode.metric}
    chats = [{"messages": task.source, "max_tokens": task.max_new_tokens, **fields} for task in rows.tasks]
    del session
    made: list[dict[str, Any]] = []
    with ExitStack() as stack:
        # Without saved prefixes: a plan reads each prompt from its beginning, and these come again and again.
        command = ours(args.bundle, args.threads, args.batch, 4096, "--cache-bytes", "0")
        servers = [
            stack.enter_context(Server(command, args.logs / f"plan-check-{i}.log"))
            for i in range(args.replicas)
        ]
        ports = [server.port for server in servers]
        warm = [{**chat, "port": port} for port in ports for chat in chats[:4]]
        asyncio.run(loops.closed(ask, warm, args.replicas))
        for number, multiple in enumerate(args.multiples):
            rate, seed = capacity * multiple, args.seed + number
            count = max(args.least, round(rate * args.seconds))
            order = arrivals.order(len(chats), count, seed)
            run = fleet.run(arrivals.poisson(rate, count, seed), order, args.replicas, "turns")
            asked = [{**chats[which], "port": ports[i % len(ports)]} for i, which in enumerate(order)]
            outcome = asyncio.run(loops.opened(ask, asked, rate, seed))
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
                    "p50_plan": round(p50, 4),
                    "p50_real": real.get("p50"),
                    "p95_plan": round(p95, 4),
                    "p95_real": real.get("p95"),
                    "p95_off": round(p95 / real["p95"] - 1, 3) if real.get("p95") else None,
                }
            )
            say(f"{multiple:g} of capacity: p95 {p95:.3g} s planned, {real.get('p95')} s measured")
    value = {"mode": mode.name, "batch": args.batch, "replicas": args.replicas, "task": request.task_name}
    value |= {"capacity": capacity, "slower": basis.slower, "cost": basis.cost.points, "rows": made}
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
    made.add_argument("--multiples", type=float, nargs="+", default=[0.3, 0.6, 0.85])
    made.add_argument("--seconds", type=float, default=180, help="of arrivals for each multiple")
    made.add_argument("--least", type=int, default=100, help="requests for each multiple")
    made.add_argument("--limit", type=int, default=48, help="rows of the task")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--force", action="store_true", help="record anew: what was recorded was on a busy machine"
    )
    made.add_argument("--output", type=Path, help="folder of what was recorded")
    made.add_argument("--logs", type=Path, default=Path("build/logs"))
    made.add_argument("--json", type=Path, help="default: results/plan_check.json")
    return made


def main(argv: list[str] | None = None) -> None:
    check(parser().parse_args(argv))


if __name__ == "__main__":
    main()
