"""The file of a stored grammar: an automaton over bytes, as docs/format.md says. Knows its place in
a bundle.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from itertools import accumulate, pairwise

from ..bundle.files import read_small
from ..bundle.open import Bundle
from ..errors import BundleError
from .regular.automaton import MOST_EDGES, MOST_STATES, Automaton

MAGIC = b"MARSDFA\x01"
HEADER = struct.Struct("<8sII")  # the magic with its version, states, edges
MOST_BYTES = HEADER.size + 4 * (MOST_STATES + 1) + 6 * MOST_EDGES + MOST_STATES // 8 + 1


def written(automaton: Automaton) -> bytes:
    """The content of the file."""
    edges = [edge for each in automaton.edges for edge in each]
    sizes = [len(each) for each in automaton.edges]
    ends = bytearray(-(-len(sizes) // 8))
    for state in automaton.ends:
        ends[state // 8] |= 1 << state % 8
    return b"".join(
        [
            HEADER.pack(MAGIC, len(sizes), len(edges)),
            struct.pack(f"<{len(sizes) + 1}I", *accumulate(sizes, initial=0)),
            struct.pack(f"<{len(edges)}I", *(target for _, _, target in edges)),
            bytes(low for low, _, _ in edges),
            bytes(high for _, high, _ in edges),
            bytes(ends),
        ]
    )


def file_name(content: bytes) -> str:
    return f"grammar-{sha256(content).hexdigest()[:16]}.dfa"


def read_automaton(bundle: Bundle, file: str) -> Automaton:
    """Of a bundle's file. Raises BundleError for one that cannot be read, or is no automaton."""
    path = bundle.path / file
    try:
        content = read_small(path, MOST_BYTES, links=True)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
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
    first = struct.unpack_from(f"<{states + 1}I", content, at)
    at += 4 * (states + 1)
    target = struct.unpack_from(f"<{edges}I", content, at)
    at += 4 * edges
    low, high, bits = (
        content[at : at + edges],
        content[at + edges : at + 2 * edges],
        content[at + 2 * edges :],
    )
    if first[0] != 0 or first[-1] != edges or any(b < a for a, b in pairwise(first)):
        raise wrong("the edges of its states are not one behind the other")
    each = list(zip(low, high, target, strict=True))
    found = Automaton(
        tuple(tuple(each[a:b]) for a, b in pairwise(first)),
        frozenset(i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1),
    )
    if any(to >= states or a > b for a, b, to in each) or any(
        later[0] <= before[1] for own in found.edges for before, later in pairwise(own)
    ):
        raise wrong("an edge leads nowhere, or bytes are not in order")
    if max(found.ends, default=0) >= states:
        raise wrong("an end that is no state")
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
