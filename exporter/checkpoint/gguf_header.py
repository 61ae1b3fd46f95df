"""The header of a GGUF file, walked before anything else reads it: every count must fit into the file."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by GGUF's type
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MOST_TENSORS, MOST_FIELDS, HIGHEST_RANK = 100_000, 10_000, 4
LARGEST_SIZE = 2**53


def check_header(path: Path) -> None:
    """Raise ValueError for a file that is no GGUF file, is cut, or has counts that it cannot hold."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        header.at = 4
        version = header.number(4)
        if version not in VERSIONS:
            raise ValueError(f"version {version} (known: {', '.join(map(str, VERSIONS))}, little-endian)")
        tensors, fields = header.number(8), header.number(8)
        if tensors > MOST_TENSORS or fields > MOST_FIELDS:
            raise ValueError(f"{tensors} tensors and {fields} fields")
        for _ in range(fields):
            header.skip_string()
            header.skip_value(header.number(4))
        for _ in range(tensors):
            header.skip_tensor()


class _Header:
    """A place in the file that only moves forward, and never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise ValueError("truncated")
        self.at += count

    def number(self, width: int) -> int:
        self.skip(width)
        return int(struct.unpack_from("<I" if width == 4 else "<Q", self.data, self.at - width)[0])

    def skip_string(self) -> None:
        self.skip(self.number(8))

    def skip_value(self, kind: int) -> None:
        if kind == STRING:
            self.skip_string()
        elif kind == ARRAY:
            item, count = self.number(4), self.number(8)
            if item in SIZES:
                self.skip(count * SIZES[item])
            elif item != STRING:
                raise ValueError(f"an array of type {item}")
            elif count > (len(self.data) - self.at) // 8:
                raise ValueError("truncated")
            else:
                for _ in range(count):
                    self.skip_string()
        elif kind in SIZES:
            self.skip(SIZES[kind])
        else:
            raise ValueError(f"a field of type {kind}")

    def skip_tensor(self) -> None:
        self.skip_string()
        rank, count = self.number(4), 1
        if rank > HIGHEST_RANK:
            raise ValueError(f"a tensor of {rank} dimensions")
        for _ in range(rank):
            count *= self.number(8)
            if count > LARGEST_SIZE:
                raise ValueError("a tensor that no file can hold")
        self.skip(12)  # its type and its offset
