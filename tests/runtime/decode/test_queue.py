"""Who gets a place next: clients take turns, a client has its limit, and prompts are read side by side."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable

import pytest
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend
from support.loops import outcomes

from mars_export import GenerationConfig
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Queue, Schedule
from mars_export.runtime.decode.sequence import Sequence


def seq(index: int, client: Hashable, prompt: int = 2, new: int = 3) -> Sequence:
    config = GenerationConfig(tau=1.0, max_new_tokens=new, eos_ids=())
    seq = Sequence(index, [1 + index % 50] * prompt, config, ())
    seq.client = client
    return seq


def queue(clients: str) -> Queue:
    made = Queue()
    for i, client in enumerate(clients):
        made.add(seq(i, client))
    return made


def order(waiting: Queue) -> str:
    found = ""
    while waiting:
        first = next(iter(waiting))
        waiting.remove(first)
        found += str(first.client)
    return found


@pytest.mark.parametrize(
    ("came", "served"),
    [("aaaa", "aaaa"), ("aaaab", "abaaa"), ("aaabbbc", "abcabab"), ("abab", "abab"), ("cab", "cab")],
)
def test_clients_take_turns(came: str, served: str) -> None:
    assert order(queue(came)) == served
    assert "".join(str(each.client) for each in queue(came)) == served, "iterated over, in the same order"


def test_nobody_starves_whatever_comes() -> None:
    """However many others push in, the first of a client is served before any other client's third."""
    source = random.Random(5)
    for _ in range(200):
        waiting, since = Queue(), dict[str, Counter[str]]()
        for i in range(60):
            if source.random() < 0.6:
                client = source.choice("aaaaaaabc")
                if not any(r.client == client for r in waiting):
                    since[client] = Counter()
                waiting.add(seq(i, client))
            elif waiting:
                taken = next(iter(waiting))
                waiting.remove(taken)
                for client, others in since.items():
                    if client != taken.client and any(r.client == client for r in waiting):
                        others[str(taken.client)] += 1
                        assert others[str(taken.client)] <= 2
                since[str(taken.client)] = Counter()


@pytest.mark.parametrize("same", [True, False])
def test_a_short_prompt_behind_a_long_one_is_answered_first(same: bool) -> None:
    """A prompt of 100 pieces, then one of 1: they share the pieces of a step, so the short one does not wait
    for 100 steps, and the long one goes on.
    """
    backend = FakeBackend(chaotic)
    schedule = Schedule(backend, BLOCK, MASK, Limits(max_rows=3, prefill_tokens=10))
    running, long = seq(0, "a", new=400), seq(1, "a", prompt=1000)
    schedule.add(running)
    outcomes(schedule)
    schedule.add(long)
    for _ in range(5):
        outcomes(schedule)
    short = seq(2, "a" if same else "b")
    schedule.add(short)
    read, steps = long.cursor, 0
    while not short.stats.tokens:
        before = running.stats.tokens
        outcomes(schedule)
        steps += 1
        assert running.stats.tokens > before, "and whoever runs gets a token in each step"
        assert steps < 4
    assert 0 < long.cursor < 1000
    while short.finish_reason is None:
        outcomes(schedule)
    for _ in range(3):
        outcomes(schedule)
    assert long.cursor > read
    assert long.finish_reason is None
