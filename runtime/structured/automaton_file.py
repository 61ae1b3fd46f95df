"""The file of a stored grammar: an automaton over bytes. docs/format.md specifies it."""

from __future__ import annotations

import struct
from hashlib import sha256
from itertools import accumulate, pairwise

from ..bundle.files import read_small
from ..bundle.open import Bundle
from ..errors import BundleError
from .regular.automaton import MAX_EDGES, MAX_STATES, Automaton, live_states

MAGIC = b"MARSDFA\x01"
HEADER = struct.Struct("<8sII")  # the magic with its version, states, edges
MAX_BYTES = HEADER.size + 4 * (MAX_STATES + 1) + 6 * MAX_EDGES + MAX_STATES // 8 + 1


def to_bytes(automaton: Automaton) -> bytes:
    """The content of the file."""
    edges = [edge for state in automaton.edges for edge in state]
    sizes = [len(state) for state in automaton.edges]
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
    """Read a file of the bundle. Raises BundleError if it is unreadable or not an automaton."""
    path = bundle.path / file
    try:
        content = read_small(path, MAX_BYTES, links=True)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
    return parse(content, str(path))


def parse(content: bytes, where: str) -> Automaton:
    """The automaton in the untrusted content of a file. Raises BundleError."""

    def wrong(what: str) -> BundleError:
        return BundleError(f"{where}: {what}; compile the grammar again with `mars-export grammar`")

    if len(content) < HEADER.size or content[:7] != MAGIC[:7]:
        raise wrong("not the automaton of a grammar")
    magic, states, edges = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise wrong(f"written as version {magic[7]}, this runtime reads {MAGIC[7]}")
    if not 1 <= states <= MAX_STATES or edges > MAX_EDGES:
        raise wrong(f"{states} states and {edges} edges, more than {MAX_STATES} and {MAX_EDGES}, or none")
    if len(content) != HEADER.size + 4 * (states + 1) + 6 * edges + (states + 7) // 8:
        raise wrong(f"{len(content)} bytes are not {states} states and {edges} edges")
    at = HEADER.size
    first = struct.unpack_from(f"<{states + 1}I", content, at)
    at += 4 * (states + 1)
    target = struct.unpack_from(f"<{edges}I", content, at)
    at += 4 * edges
    low, high = content[at : at + edges], content[at + edges : at + 2 * edges]
    bits = content[at + 2 * edges :]
    if first[0] != 0 or first[-1] != edges or any(b < a for a, b in pairwise(first)):
        raise wrong("the edges of its states are not in order")
    all_edges = list(zip(low, high, target, strict=True))
    automaton = Automaton(
        tuple(tuple(all_edges[a:b]) for a, b in pairwise(first)),
        frozenset(i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1),
    )
    if any(to >= states or a > b for a, b, to in all_edges) or any(
        right[0] <= left[1] for state in automaton.edges for left, right in pairwise(state)
    ):
        raise wrong("an edge leads nowhere, or bytes are not in order")
    if max(automaton.ends, default=0) >= states:
        raise wrong("an end that is not a state")
    if len(live_states(([to for _, _, to in state] for state in automaton.edges), automaton.ends)) < states:
        raise wrong("there are states from which no answer can end")
    return automaton
