"""Writes the file of a stored grammar, an automaton over bytes, for libmars. docs/format.md specifies it."""

from __future__ import annotations

import struct
from hashlib import sha256
from itertools import accumulate

from .regular.automaton import Automaton

MAGIC = b"MARSDFA\x01"
HEADER = struct.Struct("<8sII")  # the magic with its version, states, edges


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
