"""Other threads end and steer sequences at any line of a step; answers, memory and prefixes stay right."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from support.chaos import BLOCK, ChaoticOracle, chaotic
from support.fake import MASK
from support.loops import planner_of
from support.oracle import generate
from support.prefixes import PLENTY, Strict

from mars_export import GenerationConfig, Limits
from mars_export.runtime.decode.budget import KvBudget
from mars_export.runtime.decode.event import Event
from mars_export.runtime.decode.prefix import PrefixCache
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost

CHANGES: list[dict[str, Any]] = [{"tau": 0.5}, {"exact": True}, {"masks": 1}, {"masks": "full"}]
# Rows hold other rows' entries for a moment within these.
OFTEN = ("drop_finished", "move", "add", "store", "save", "_shrink")


class Outsiders:
    """Ends and steers sequences before random lines of the modules of decode/, as threads might."""

    def __init__(self, draw: random.Random, schedule: Schedule, seqs: list[Sequence]) -> None:
        self.draw, self.schedule, self.seqs = draw, schedule, seqs
        self.rate, self.steered = draw.choice([0, 0.0005, 0.005]), set[int]()

    def step(self) -> list[Event]:
        """One step of the schedule, with them."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return [each for accepted in self.schedule.step() for each in accepted]
        finally:
            sys.settrace(before)

    def _call(self, frame: Any, _event: str, _arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if "/runtime/decode/" in file and not file.endswith("/config.py") else None

    def _line(self, frame: Any, event: str, _arg: Any) -> Any:
        is_often = frame.f_code.co_name in OFTEN
        if event == "line" and self.draw.random() < (0.05 if is_often else self.rate):
            batch = self.schedule.batch
            last = batch.decoding[-1:] or batch.active[-1:]  # which moves to where another row ended
            seq = self.draw.choice(last if last and is_often else batch.active or self.seqs)
            if self.draw.random() < 0.3:
                seq.end("cancelled")
            else:
                self.steered.add(seq.index)
                seq.change(**self.draw.choice(CHANGES))
        return self._line


def sequence(draw: random.Random, i: int, histories: list[list[int]], store: PrefixCache) -> Sequence:
    history, tau = draw.choice(histories), draw.choice([None, 0.5, 0.75, 1.0])
    prompt = history[: draw.randrange(1, len(history) + 1)] + draw.choices([1, 2, 3], k=draw.randrange(6))
    config = GenerationConfig(
        tau=tau, masks=draw.choice(["full", 1]), max_new_tokens=draw.choice([1, 2, 7, 30, 90]),
        eos_ids=draw.choice([(), (3,)]), cache_salt=draw.choice(["", "b"]),
    )  # fmt: skip
    handle, client = store.handle(config.cache_salt, (4, 9)), draw.choice(["A", "B", None])
    seq = Sequence(i, prompt, config, (), prefix_handle=handle)
    seq.client = client
    return seq


@pytest.mark.parametrize("seed", range(0, 160, 20))
def test_rows_stay_their_own(seed: int) -> None:
    for number in range(seed, seed + 20):
        a_service(random.Random(number))


def a_service(draw: random.Random) -> None:
    rows, reproducible_slots = draw.choice([1, 3, 5, 8]), draw.choice([None, 1, 1, 2])
    backend = Strict(reproducible_slots, draw.choice([10**6, 160]))
    store = PrefixCache(draw.choice([0, 4000, PLENTY, PLENTY]), reproducible_slots)
    num_bytes = draw.choice([None, 8 * rows * draw.choice([350, 500, 900])])
    budget = KvBudget(rows, num_bytes, 8, backend.max_capacity, by_row=draw.random() < 0.6)
    limits = Limits(rows, prefill_tokens=draw.choice([1, 3, 8, 17]), cache_block=draw.choice([1, 4, 32]))
    planner = draw.choice([None, planner_of(Cost(((1, 1.0),)))])
    schedule = Schedule(backend, BLOCK, MASK, limits, planner, budget)
    histories = [draw.choices(range(1, 9), k=draw.randrange(1, 60)) for _ in range(8)]
    seqs = [sequence(draw, i, histories, store) for i in range(draw.randrange(8, 24))]
    asked, waiting = [(seq.tokens.copy(), seq.config) for seq in seqs], seqs.copy()
    outsiders = Outsiders(draw, schedule, seqs)
    told: list[list[tuple[int, ...]]] = [[] for _ in seqs]
    while waiting or not schedule.is_idle:
        while waiting and draw.random() < 0.5:
            schedule.add(waiting.pop(0))
        for each in outsiders.step():
            assert each.error is None
            told[each.seq].append(each.token_ids)
        entries = schedule.batch.cache.entries  # type: ignore[attr-defined]
        if num_bytes is not None:
            used = (entries >= 0).sum() if budget.by_row else entries.size
            assert used <= budget.num_entries
            assert not budget.by_row or (entries[schedule.num_running :] < 0).all(), "memory is given back"
    for seq, (prompt, config), steps in zip(seqs, asked, told, strict=True):
        known = prompt.copy()
        for step in steps:  # each token is verified, or a prediction of masks after what was known
            for j, token in enumerate(step):
                assert token in (chaotic((*known, *step[:j]), 0)[0], chaotic(tuple(known), j)[0])
            known += step
        assert seq.tokens == known
        if seq.index not in outsiders.steered:
            tau, block = config.tau or 1.0, 1 if config.exact else limits.cache_block
            width = config.masks + 1 if isinstance(config.masks, int) else None
            wanted = generate(
                ChaoticOracle(), prompt, tau, max_new=config.max_new_tokens, eos=config.eos_ids or (),
                cache_block=block, capacity=backend.max_capacity, width=width,
            ).tokens  # fmt: skip
            answer = seq.tokens[len(prompt) :]
            assert answer == (wanted[: len(answer)] if seq.finish_reason == "cancelled" else wanted)
    assert store.stats.failed == 0
    for entry in store.entries:
        ids = np.frombuffer(entry.key, ">u4").tolist()
        assert entry.saved.data[: entry.saved.length].tolist() == ids, "entries of other tokens"
