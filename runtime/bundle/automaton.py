"""The file of a stored grammar: an automaton over bytes, as docs/format.md says. Knows no bundle."""

from __future__ import annotations

import struct
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import BundleError
from ..regular.automaton import MOST_EDGES, MOST_STATES, Automaton
from .files import read_small

MAGIC = b"MARSDFA\x01"
HEADER = struct.Struct("<8sII")  # the magic with its version, states, edges
MOST_BYTES = HEADER.size + 4 * (MOST_STATES + 1) + 6 * MOST_EDGES + MOST_STATES // 8 + 1


def written(automaton: Automaton) -> bytes:
    """The content of the file."""
    edges = [edge for each in automaton.edges for edge in each]
    sizes = [len(each) for each in automaton.edges]
    low, high, target = (np.array([edge[i] for edge in edges], np.int64) for i in range(3))
    ends = np.zeros(len(sizes), bool)
    ends[sorted(automaton.ends)] = True
    return b"".join(
        [
            HEADER.pack(MAGIC, len(sizes), len(edges)),
            np.cumsum([0, *sizes]).astype("<u4").tobytes(),
            target.astype("<u4").tobytes(),
            low.astype(np.uint8).tobytes(),
            high.astype(np.uint8).tobytes(),
            np.packbits(ends, bitorder="little").tobytes(),
        ]
    )


def file_name(content: bytes) -> str:
    return f"grammar-{sha256(content).hexdigest()[:16]}.dfa"


def read_automaton(path: Path) -> Automaton:
    """Raises BundleError for a file that cannot be read, or is no automaton."""
    try:
        content = read_small(path, MOST_BYTES)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror}); compile the grammar again") from error
    return parsed(content, str(path))


def parsed(content: bytes, where: str) -> Automaton:
    """The automaton in the content of a file, in which nothing is trusted. Raises BundleError."""

    def wrong(what: str) -> BundleError:
        return BundleError(f"{where}: {what}; compile the grammar again with `mars-export grammar`")

    if len(content) < HEADER.size or content[:7] != MAGIC[:7]:
        raise wrong("not the automaton of a grammar")
    magic, states, edges = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise wrong(f"written as version {magic[7]}, this runtime reads {MAGIC[7]}")
    if not 1 <= states <= MOST_STATES or edges > MOST_EDGES:
        raise wrong(f"{states} states and {edges} edges, more than {MOST_STATES} and {MOST_EDGES}, or none")
    if len(content) != HEADER.size + 4 * (states + 1) + 6 * edges + (states + 7) // 8:
        raise wrong(f"{len(content)} bytes are not {states} states and {edges} edges")
    at = HEADER.size
    first = np.frombuffer(content, "<u4", states + 1, at).astype(np.int64)
    at += 4 * (states + 1)
    target = np.frombuffer(content, "<u4", edges, at).astype(np.int64)
    at += 4 * edges
    low = np.frombuffer(content, np.uint8, edges, at).astype(np.int64)
    high = np.frombuffer(content, np.uint8, edges, at + edges).astype(np.int64)
    bits = np.unpackbits(np.frombuffer(content, np.uint8, -1, at + 2 * edges), bitorder="little")
    if first[0] != 0 or first[-1] != edges or (np.diff(first) < 0).any():
        raise wrong("the edges of its states are not one behind the other")
    begins = np.zeros(edges + 1, bool)
    begins[first] = True
    if (target >= states).any() or (low > high).any() or (~begins[1:-1] & (low[1:] <= high[:-1])).any():
        raise wrong("an edge leads nowhere, or bytes are not in order")
    if bits[states:].any():
        raise wrong("an end that is no state")
    ends = frozenset(np.flatnonzero(bits[:states]).tolist())
    each = list(zip(low.tolist(), high.tolist(), target.tolist(), strict=True))
    bounds = first.tolist()
    found = Automaton(tuple(tuple(each[a:b]) for a, b in pairwise(bounds)), ends)
    if not _ends_everywhere(found):
        raise wrong("there are states from which no answer can end")
    return found


def _ends_everywhere(automaton: Automaton) -> bool:
    before: list[list[int]] = [[] for _ in automaton.edges]
    for state, edges in enumerate(automaton.edges):
        for _, _, target in edges:
            before[target].append(state)
    good, todo = set(automaton.ends), list(automaton.ends)
    while todo:
        for state in before[todo.pop()]:
            if state not in good:
                good.add(state)
                todo.append(state)
    return len(good) == len(automaton.edges)
