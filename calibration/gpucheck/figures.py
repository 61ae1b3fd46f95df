"""What a bundle costs on a device: steps, answers, batches, first tokens, memory. Each is one function of the
subject, measured in interleaved rounds; nothing here fails for being slow, but for growing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ...runtime import Batcher, GenerationConfig, Limits, Session
from ..rounds import Rounds, interleaved
from .outcome import Found, NotHere
from .subject import Clocked, Subject

SLOTS = (1, 2, 4, 8, 15)
CAPACITIES = (512, 4096)
STEP_ROUNDS, STEP_REPEATS, ROUNDS = 9, 4, 3
PROMPTS_OF_FIRST = (128, 1024)
BATCHES = (1, 4, 8, 16)
MOST_GROWTH = 64 << 20  # bytes of the device's memory between the first quarter of the requests and the last
MODES: dict[str, dict[str, Any]] = {
    "one token": {"tau": 1.0},
    "tau 0.95": {"tau": 0.95},
    "exact": {"exact": True},
}


def steps(subject: Subject) -> Found:
    """Milliseconds of a step by its slots, on rows of little and of much capacity."""
    backend, found = subject.session.backend, {}
    most = backend.max_slots or max(SLOTS)
    for capacity in CAPACITIES:
        if capacity > backend.max_capacity:
            continue
        cache = backend.new_cache(1)
        cache.reserve(capacity)
        cursor = np.array([capacity // 2], np.int64)
        shapes = [slots for slots in SLOTS if slots <= most]
        times: dict[int, list[float]] = {slots: [] for slots in shapes}
        for _, _, slots in interleaved(shapes, 1, STEP_ROUNDS):
            ids = np.full((1, slots), subject.session.bundle.manifest.tokens.mask, np.int64)
            index = np.arange(slots, dtype=np.int64)[None]
            for repeat in range(1 + STEP_REPEATS):
                began = perf_counter()
                backend.step(cache, 0, ids, cursor, index[:, -(backend.max_outputs or slots) :], False)
                if repeat:
                    times[slots].append(1000 * (perf_counter() - began))
        found[str(capacity)] = {str(slots): round(median(values), 4) for slots, values in times.items()}
    if not found:
        raise NotHere(f"rows hold {backend.max_capacity} tokens at most; steps are timed at {CAPACITIES[0]}")
    lines = [
        f"capacity {c}: " + ", ".join(f"{s}: {ms:.2f}" for s, ms in row.items()) for c, row in found.items()
    ]
    ratios = {c: round(row["8"] / row["1"], 3) for c, row in found.items() if "8" in row}
    lines += [f"step(8)/step(1) {', '.join(f'{r:.2f}' for r in ratios.values())}"] if ratios else []
    return Found(True, "ms by slots, " + "; ".join(lines), {"ms": found, "eight_to_one": ratios})


def speed(subject: Subject) -> Found:
    """Tokens a second of one row: one token at a time, tau 0.95, exact; and the host's share of a step."""
    session, config = subject.session, subject.config
    clock = Clocked(session.backend)
    own = Session(session.bundle, session.variant, clock)
    own.cost = session.cost
    settings = {name: config.with_values(**changes) for name, changes in MODES.items()}
    prompts = subject.prompts[: max(4, subject.rows // 2)]
    rates: dict[str, list[float]] = {name: [] for name in settings}
    counts = {name: [0, 0] for name in settings}
    host = {name: [0.0, 0.0, 0] for name in settings}
    for _, _, name in interleaved(list(settings), 1, ROUNDS):
        began, inside, taken = perf_counter(), clock.seconds, clock.steps
        answers = [own.generate(prompt, settings[name]) for prompt in prompts]
        seconds = perf_counter() - began
        rates[name].append(sum(a.stats.tokens for a in answers) / seconds)
        counts[name][0] += sum(a.stats.tokens for a in answers)
        counts[name][1] += sum(a.stats.forwards for a in answers)
        host[name][0] += seconds - (clock.seconds - inside)
        host[name][1] += seconds
        host[name][2] += clock.steps - taken
    table = {
        name: {
            "tokens_per_second": round(median(values), 2),
            "tokens_per_forward": round(counts[name][0] / max(1, counts[name][1]), 3),
            "speed_up": round(median(v / o for v, o in zip(values, rates["one token"], strict=True)), 3),
            "host_share": round(host[name][0] / host[name][1], 4),
            "host_us_per_step": round(1e6 * host[name][0] / max(1, host[name][2]), 1),
        }
        for name, values in rates.items()
    }
    words = [
        f"{name} {v['tokens_per_second']:.0f} tokens/s ({v['speed_up']:.2f}x, {v['tokens_per_forward']:.2f}"
        f" per forward, host {100 * v['host_share']:.1f} %)"
        for name, v in table.items()
    ]
    return Found(True, "; ".join(words), {"modes": table})


def batches(subject: Subject) -> Found:
    """Tokens a second of batches, tau 0.95 and exact beside one token at a time at the same batch."""
    config, table = subject.config, {}
    for rows in BATCHES:
        if subject.most_rows(rows) < rows:
            continue
        prompts = [subject.prompts[i % len(subject.prompts)] for i in range(max(2 * rows, 8))]
        rates: dict[str, list[float]] = {name: [] for name in MODES}
        for _, _, name in interleaved(list(MODES), 1, ROUNDS):
            settings = config.with_values(**MODES[name])
            began = perf_counter()
            answers = list(subject.session.generate_each(prompts, settings, batch=rows))
            rates[name].append(sum(a.stats.tokens for a in answers) / (perf_counter() - began))
        table[str(rows)] = {
            name: {
                "tokens_per_second": round(median(values), 2),
                "speed_up": round(median(v / o for v, o in zip(values, rates["one token"], strict=True)), 3),
            }
            for name, values in rates.items()
        }
    words = [
        f"{rows}: "
        + ", ".join(f"{name} {v['tokens_per_second']:.0f} ({v['speed_up']:.2f}x)" for name, v in row.items())
        for rows, row in table.items()
    ]
    return Found(True, "tokens/s by rows, " + "; ".join(words), {"batches": table})


def first(subject: Subject) -> Found:
    """Milliseconds to the first token, by the length of the prompt."""
    session, found = subject.session, {}
    for length in PROMPTS_OF_FIRST:
        if length + 2 * subject.block > session.backend.max_capacity:
            continue
        prompt = (list(subject.prompts[0]) * length)[:length]
        times = [
            1000 * session.generate(prompt, GenerationConfig(max_new_tokens=1)).stats.time_to_first_token
            for _ in range(1 + ROUNDS)
        ]
        found[str(length)] = Rounds.of(times[1:])
    if not found:
        raise NotHere("no prompt of those lengths fits")
    words = ", ".join(f"{length} tokens: {r.median:.1f}" for length, r in found.items())
    figures: dict[str, Any] = {"ms": {n: [r.median, r.low, r.high] for n, r in found.items()}}
    return Found(True, f"ms, {words}", figures)


def growth(subject: Subject) -> Found:
    """Many short requests of all kinds, a part of them cancelled, leave no memory behind."""
    total = subject.requests
    quarter, kinds = max(1, total // 4), list(MODES.values())
    with Batcher(subject.session, Limits(max_rows=subject.most_rows(8))) as service:
        _send(service, subject, quarter, kinds)
        with subject.memory() as seen:
            _send(service, subject, total - quarter, kinds)
    if "after" not in seen:
        raise NotHere(f"{total} requests were answered; this device does not say how much memory is in use")
    grown = seen["after"] - seen["before"]
    detail = (
        f"{total} requests, {grown / 2**20:+.1f} MiB on the device ({seen['after'] / 2**30:.2f} GiB in use)"
    )
    return Found(grown <= MOST_GROWTH, detail, {"requests": total, **seen})


def _send(service: Batcher, subject: Subject, count: int, kinds: Sequence[dict[str, Any]]) -> None:
    """`count` requests, at most a queue's length at once; each seventh is cancelled at its first event."""
    running: list[Any] = []
    for i in range(count):
        prompt = subject.prompts[i % len(subject.prompts)]
        config = GenerationConfig(max_new_tokens=8).with_values(**kinds[i % len(kinds)])
        request = service.submit(prompt, config, wait=None)
        if i % 7 == 0:
            request.cancel()
        else:
            running.append(request)
        while len(running) > 16:
            running.pop(0).result()
    for request in running:
        request.result()
