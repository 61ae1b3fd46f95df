"""Which replica has read the beginning of a prompt before, and which one a request goes to. Knows no Ray."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

CHARACTERS, IDS = 256, 64  # of a text completion's prompt, in one piece
MOST_ENDS = 32  # keys of the beginning, and of the end, that one request has
MOST_HOMES = 4  # replicas that are remembered for one key
MOST_KEYS = 65_536

Route = Literal["conversation", "beginning", "spill", "balance"]
"""Why a request is where it is: its longest known beginning was there, or a shorter one; what knew it was too
busy; nobody knew it.
"""


def keys_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Hashes of what the prompt begins with, each of more than the one before: of the system message, of it
    and the first turn, and so on. Requests share a key where the prefix store may share entries.
    """
    digest = blake2b(_canonical([body.get("cache_salt"), body.get("tools")]), digest_size=12)
    keys = []
    for piece in _pieces(body):
        digest.update(b"\0" + _canonical(piece))
        keys.append(digest.hexdigest())
    if len(keys) > 2 * MOST_ENDS:
        keys = keys[:MOST_ENDS] + keys[-MOST_ENDS:]
    return tuple(keys)


def _pieces(body: Mapping[str, Any]) -> Sequence[Any]:
    if isinstance(messages := body.get("messages"), list):
        return messages
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts the first decides
    if not isinstance(prompt, str | list):
        return []
    size = CHARACTERS if isinstance(prompt, str) else IDS
    return [prompt[i : i + size] for i in range(0, len(prompt) - size + 1, size)]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "backslashreplace")


class Homes:
    """Where beginnings were read last, by their keys; what was not asked for longest is forgotten first."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._replicas: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def of(self, key: str) -> tuple[str, ...]:
        """The replicas that read it, the latest first."""
        return self._replicas.get(key, ())

    def put(self, keys: Sequence[str], replica: str) -> None:
        """A request with these keys went there."""
        for key in keys:
            others = [other for other in self._replicas.pop(key, ()) if other != replica]
            self._replicas[key] = (replica, *others[: MOST_HOMES - 1])
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """It is gone, with all that it had read."""
        for key, replicas in list(self._replicas.items()):
            if replica in replicas:
                left = tuple(other for other in replicas if other != replica)
                if left:
                    self._replicas[key] = left
                else:
                    del self._replicas[key]

    def why(self, keys: Sequence[str], replica: str) -> Route:
        """What a request with these keys finds at the replica that it is sent to."""
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
    """Ranks of replicas to try, of those in `loads` (their running requests): first the one that has most of
    the prompt's beginning, unless it has more than `bound` requests beyond the idlest one's; then two drawn
    at random: the caller takes the idler.
    """
    there = [replica for replica in loads if replica not in avoid] or list(loads)
    if not there:
        return []
    most = min(loads[replica] for replica in there) + bound
    ranks = []
    for key in reversed(keys):
        having = [replica for replica in homes.of(key) if replica in there and loads[replica] <= most]
        if having:
            ranks.append([min(having, key=lambda replica: loads[replica])])
            break
    ranks.append(draw.sample(there, min(2, len(there))))
    return ranks
