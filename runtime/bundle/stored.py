"""What a manifest says of KV entries that are kept in the bundle: the beginning of a prompt, read once.

Knows sizes and names; runtime/warm.py reads and writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from .fields import Rule

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FILE = re.compile(r"prefix-[0-9a-f]{16}\.kv")
ALIGNMENT = 64  # bytes: where the entries begin, behind the ids
ID_SIZE = 4
KV_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """What is bound to one variant: KV entries of the first `length` tokens of a prompt, in `file`.

    `piece`: the size of the pieces that the prompt was read in, None where entries do not depend on it. The
    other fields say what wrote them, as those of a profile do.
    """

    name: str
    file: str
    length: Annotated[int, Rule(1, 2**31)]
    piece: Annotated[int | None, Rule(1, 2**31)]
    variant: str
    variant_sha256: str
    weights_sha256: str | None
    precision: str
    kv_dtype: Annotated[str, Rule(choices=KV_DTYPES)]
    kv_layout: str
    device: str
    accuracy_level: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What contradicts itself in what was read."""
        if NAME.fullmatch(self.name) is None:
            yield (
                "name",
                f"`{self.name[:60]}` is not letters, digits, dots, dashes and underscores, 64 at most",
            )
        if FILE.fullmatch(self.file) is None:
            yield "file", f"`{self.file[:60]}` is not prefix-, 16 hexadecimal digits and .kv"
        if self.piece is not None and self.length % self.piece:
            yield "length", f"{self.length} is not a multiple of piece, {self.piece}"


def ids_size(length: int) -> int:
    """Bytes that the ids take, filled up with zeros."""
    return -(-ID_SIZE * length // ALIGNMENT) * ALIGNMENT


def file_size(entry_bytes: int, length: int) -> int:
    """Bytes of a file of `length` entries."""
    return ids_size(length) + length * entry_bytes
