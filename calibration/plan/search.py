"""The fewest replicas that keep a p95, for one kind of replica. Knows no bundle and no words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .arrivals import order, poisson
from .fleet import Fleet, Run
from .options import PlanOptions

EMPTY = 10  # the first of so many parts of the requests find the fleet empty and do not count
EACH = 40  # requests of a replica, at least


@dataclass(frozen=True, slots=True)
class Offer:
    """What replicas of one kind do. `replicas` is None where none or too many would be needed: `why` says
    which. `alone` is the p95 where no request meets another, `capacity` the requests a second of one replica
    that is never without work.

    `p50`, `p95` and `p99` are of the worst draw of arrivals, as is the 95th percentile of the `first` token.
    """

    mode: str
    batch: int
    replicas: int | None
    capacity: float
    alone: float
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    first: float | None = None
    busy: float | None = None
    keeps: bool = False
    why: str = ""


def offer(fleet: Fleet, options: PlanOptions, times: list[float] | None) -> Offer:
    """The fewest replicas of this kind for these options; `times` are those of a trace."""
    import numpy as np

    batch, mode, num_works = fleet.machine.max_rows, fleet.mode.name, len(fleet.works)
    full = order(num_works, max(256, 32 * batch), options.seed)
    capacity, alone = fleet.capacity(full), fleet.alone()
    bare = Offer(mode, batch, None, capacity, alone)

    def worst(num: int) -> Run:
        """Of all draws; the requests are the same for any number of replicas, so that more wait less."""
        runs = []
        for seed in range(options.seed, options.seed + (1 if times is not None else options.draws)):
            if times is None:
                assert options.rate is not None, "a plan has a rate or a trace"
                count = max(options.requests, EACH * num)
                arrivals, skip = poisson(options.rate, count, seed), count // EMPTY
            else:
                arrivals, skip = times, 0
            drawn = order(num_works, len(arrivals), seed)
            runs.append(fleet.run(arrivals, drawn, num, options.balance, seed, skip))
        return max(runs, key=lambda run: run.p95)

    def shown(num: int, run: Run, why: str) -> Offer:
        first = float(np.percentile(run.first, 95))
        keeps = run.p95 <= options.p95 and not why
        return Offer(mode, batch, num, capacity, alone, *run.percentiles, first, run.busy, keeps, why)

    least = 1 if options.rate is None else math.floor(options.rate / capacity) + 1
    if options.replicas is not None:
        why = "more come than are answered: the longer it runs, the longer they wait"
        return shown(options.replicas, worst(options.replicas), why if options.replicas < least else "")
    if alone > options.p95:
        return _without(bare, f"even alone p95 is {alone:.3g} s: no number of replicas helps")
    if least > options.max_replicas:
        return _without(bare, f"only to answer them all takes {least} replicas")
    num, run = fewest(worst, options.p95, least, options.max_replicas)
    if run.p95 > options.p95:
        return _without(bare, f"{num} replicas still have a p95 of {run.p95:.3g} s")
    return shown(num, run, "")


def fewest(runs: Callable[[int], Run], p95: float, least: int, most: int) -> tuple[int, Run]:
    """The fewest replicas from `least` to `most` that keep p95, with their run, or `most` with its run. More
    replicas are taken to be no slower: the search goes by leaps, then halves what is between."""
    below, num = least - 1, least
    run = runs(num)
    while run.p95 > p95 and num < most:
        below, num = num, min(most, num + max(1, num // 4))
        run = runs(num)
    if run.p95 > p95:
        return num, run
    while num - below > 1:
        middle = (below + num) // 2
        tried = runs(middle)
        if tried.p95 <= p95:
            num, run = middle, tried
        else:
            below = middle
    return num, run


def _without(bare: Offer, why: str) -> Offer:
    return Offer(bare.mode, bare.batch, None, bare.capacity, bare.alone, why=why)
