"""Which replica a request goes to: beginnings, bounds, and what is drawn. No Ray."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mars_export.runtime.serve.ask.request import read_ask
from mars_export.runtime.serve.ray import affinity
from mars_export.runtime.serve.ray.affinity import Homes, choose, keys_of

SYSTEM = {"role": "system", "content": "be short"}


def turn(*texts: str, **fields: Any) -> tuple[str, ...]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return keys_of(read_ask("chat", {"messages": [SYSTEM, *said], **fields}))


def ranks(homes: Homes, keys: tuple[str, ...], bound: int = 2, **loads: int) -> list[list[str]]:
    return choose(homes, keys, loads, (), bound, random.Random(0))


def test_a_later_turn_has_the_keys_of_an_earlier_one() -> None:
    first, second, other = turn("one"), turn("one", "answer", "two"), turn("else")
    assert second[: len(first)] == first and len(second) == 4
    assert other[0] == first[0] and other[1] != first[1]
    assert len(set(second)) == 4


@pytest.mark.parametrize("change", [{"cache_salt": "tenant"}, {"tools": [{"type": "function"}]}])
def test_what_the_store_does_not_share_has_no_key_in_common(change: dict[str, Any]) -> None:
    assert not set(turn("one", **change)) & set(turn("one"))


def test_a_text_has_keys_by_its_pieces() -> None:
    def keys(prompt: Any) -> tuple[str, ...]:
        return keys_of(read_ask("text", {"prompt": prompt}))

    text = "x" * (3 * affinity.CHARACTERS)
    assert len(keys(text + "more")) == 3
    assert keys(text + "more") == keys([text + "else", "other"])
    ids = list(range(2 * affinity.IDS + 5))
    assert keys(ids)[:1] == keys([ids[: affinity.IDS]]) != keys(text)
    assert keys("short") == ()


def test_the_same_chat_has_the_same_keys_in_every_protocol() -> None:
    asked = read_ask("responses", {"instructions": "be short", "input": "one"})
    assert keys_of(asked) == turn("one")


def test_the_keys_of_a_long_talk_are_its_beginning_and_its_end() -> None:
    texts = [str(i) for i in range(400)]
    long, next_turn = turn(*texts), turn(*texts, "a", "q")
    assert len(long) == len(next_turn) == 2 * affinity.MOST_ENDS
    assert long[0] == turn("0")[0] and long[-1] in next_turn


def test_a_conversation_goes_where_it_was() -> None:
    homes, first = Homes(), turn("one")
    homes.put(first, "b")
    assert ranks(homes, turn("one", "answer", "two"), a=0, b=1)[0] == ["b"]
    assert homes.why(turn("one", "answer", "two"), "b") == "conversation"


def test_a_system_message_that_is_known_draws_others() -> None:
    homes = Homes()
    homes.put(turn("one"), "b")
    assert ranks(homes, turn("another talk"), a=0, b=2)[0] == ["b"]
    assert homes.why(turn("another talk"), "b") == "beginning"


def test_the_longer_beginning_wins() -> None:
    homes = Homes()
    homes.put(turn("one"), "a")
    homes.put(turn("two")[:1], "b")  # later, but the system message alone
    assert ranks(homes, turn("one", "x", "y"), a=2, b=0)[0] == ["a"]


@pytest.mark.parametrize(("load", "stays"), [(2, True), (3, False)])
def test_who_is_too_busy_gets_no_more(load: int, stays: bool) -> None:
    homes = Homes()
    homes.put(turn("one"), "b")
    found = ranks(homes, turn("one", "x", "y"), bound=2, a=0, b=load)
    assert (found[0] == ["b"]) is stays
    assert set(found[-1]) == {"a", "b"}, "two are drawn, for when the first is full"
    assert homes.why(turn("one", "x", "y"), "a") == "spill"


def test_of_two_that_know_it_the_idler() -> None:
    homes = Homes()
    homes.put(turn("one"), "a")
    homes.put(turn("one"), "b")
    assert ranks(homes, turn("one"), a=2, b=1, c=0)[0] == ["b"]


def test_who_knows_nothing_draws_two() -> None:
    drawn: Counter[str] = Counter()
    draw = random.Random(1)
    for _ in range(300):
        [pair] = choose(Homes(), turn("new"), {"a": 0, "b": 0, "c": 9}, (), 2, draw)
        assert len(set(pair)) == 2
        drawn.update(pair)
    assert min(drawn.values()) > 150
    assert Homes().why(turn("new"), "a") == "balance"


def test_a_lost_replica_is_avoided_while_there_is_another() -> None:
    homes = Homes()
    homes.put(turn("one"), "a")
    assert choose(homes, turn("one"), {"a": 0, "b": 9}, {"a"}, 2, random.Random(0)) == [["b"]]
    assert choose(homes, turn("one"), {"a": 0}, {"a"}, 2, random.Random(0))[0] == ["a"]
    assert choose(homes, turn("one"), {}, (), 2, random.Random(0)) == []


def test_what_is_gone_is_forgotten_and_so_is_the_oldest() -> None:
    homes = Homes(most=3)
    homes.put(["x", "y"], "a")
    homes.put(["y"], "b")
    homes.forget("a")
    assert (homes.of("x"), homes.of("y")) == ((), ("b",))
    homes.put(["p", "q", "r"], "a")
    assert (homes.of("y"), homes.of("p")) == ((), ("a",))
    for name in "abcdef":
        homes.put(["p"], name)
    assert homes.of("p") == ("f", "e", "d", "c")


def test_conversations_stay_and_loads_stay_even() -> None:
    """20 conversations of 6 turns with one system message, whose requests end as they began."""
    homes, draw, where = Homes(), random.Random(3), Counter()
    loads = {"a": 0, "b": 0}
    running: list[str] = []
    moved = 0
    homes_of: dict[int, str] = {}
    for step in range(6):
        for talk in range(20):
            keys = turn(*(f"{talk} {i}" for i in range(2 * step + 1)))
            [first, *_] = choose(homes, keys, loads, (), 2, draw)
            replica = min(first, key=lambda name: loads[name])
            homes.put(keys, replica)
            moved += homes_of.get(talk, replica) != replica
            homes_of[talk] = replica
            where[replica] += 1
            loads[replica] += 1
            running.append(replica)
            assert abs(loads["a"] - loads["b"]) <= 3
            if len(running) > 8:
                loads[running.pop(0)] -= 1
    assert moved <= 12, "of a hundred later turns"
    assert min(where.values()) >= 40
