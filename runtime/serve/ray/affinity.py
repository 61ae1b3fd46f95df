"""Choosing a replica whose prefix cache is likely to have the beginning of a prompt."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from ..ask.request import Ask

CHARACTERS, IDS = 256, 64  # in a piece of a text completion's prompt
MOST_ENDS = 32  # keys of the first, and of the last pieces of a request
MOST_HOMES = 4  # replicas that are stored for one key
MOST_KEYS = 65_536

Route = Literal["conversation", "beginning", "spill", "balance"]
"""Why a replica was chosen: it has the longest known beginning, or a shorter one; the replicas that have one
are too busy; or no replica has one.
"""


def keys_of(ask: Ask) -> tuple[str, ...]:
    """Hashes of longer and longer beginnings of the prompt: of the system message, of the system message with
    the first turn, and so on. Requests with a common key may share entries of the prefix cache.
    """
    tools = None if ask.tools is None else ask.tools.functions
    digest = blake2b(_canonical([ask.settings.get("cache_salt"), tools]), digest_size=12)
    keys = []
    for piece in _pieces(ask):
        digest.update(b"\0" + _canonical(piece))
        keys.append(digest.hexdigest())
    if len(keys) > 2 * MOST_ENDS:
        keys = keys[:MOST_ENDS] + keys[-MOST_ENDS:]
    return tuple(keys)


def _pieces(ask: Ask) -> Sequence[Any]:
    prompt: Sequence[Any] = ask.prompts[0]  # the first of several prompts decides
    if ask.kind != "text":
        return prompt
    size = CHARACTERS if isinstance(prompt, str) else IDS
    return [prompt[i : i + size] for i in range(0, len(prompt) - size + 1, size)]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "backslashreplace")


class Homes:
    """The replicas that have read beginnings, by key. The least recently used keys are dropped."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._replicas: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def of(self, key: str) -> tuple[str, ...]:
        """The replicas that have read it, the latest one first."""
        return self._replicas.get(key, ())

    def put(self, keys: Sequence[str], replica: str) -> None:
        """Note that a request with these keys went to `replica`."""
        for key in keys:
            others = [other for other in self._replicas.pop(key, ()) if other != replica]
            self._replicas[key] = (replica, *others[: MOST_HOMES - 1])
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove a replica."""
        for key, replicas in list(self._replicas.items()):
            if replica in replicas:
                left = tuple(other for other in replicas if other != replica)
                if left:
                    self._replicas[key] = left
                else:
                    del self._replicas[key]

    def why(self, keys: Sequence[str], replica: str) -> Route:
        """Why a request with these keys goes to `replica`."""
        known = [key for key in keys if self.of(key)]
        if not known:
            return "balance"
        if replica in self.of(known[-1]):
            return "conversation" if len(known) > 1 else "beginning"
        return "beginning" if any(replica in self.of(key) for key in known) else "spill"


def choose(
    homes: Homes,
    keys: Sequence[str],
    loads: Mapping[str, int],
    avoid: Collection[str],
    bound: int,
    draw: random.Random,
) -> list[list[str]]:
    """The replicas to try, by rank. `loads` are the running requests of each replica.

    First comes the replica with the longest beginning of the prompt, unless it has over `bound` more requests
    than the least busy one. Then come two random ones, of which the caller takes the less busy.
    """
    candidates = [replica for replica in loads if replica not in avoid] or list(loads)
    if not candidates:
        return []
    most = min(loads[replica] for replica in candidates) + bound
    ranks = []
    for key in reversed(keys):
        owners = [replica for replica in homes.of(key) if replica in candidates and loads[replica] <= most]
        if owners:
            ranks.append([min(owners, key=lambda replica: loads[replica])])
            break
    ranks.append(draw.sample(candidates, min(2, len(candidates))))
    return ranks
