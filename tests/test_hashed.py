"""A file hashed while it is written: its entry is what reading it back would give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mars_export.exporter.hashed import HashedFile
from mars_export.runtime.files import describe


@pytest.mark.parametrize("pieces", [[], [b""], [b"a", b"", b"bc"], [bytes(3_000_000), b"x", bytes(range(256)) * 9000]], ids=len)
def test_its_entry_is_that_of_the_file(pieces: list[bytes], tmp_path: Path) -> None:
    with HashedFile(tmp_path / "weights.bin") as file:
        for piece in pieces:
            file.write(piece)
        entry = file.entry()
    assert entry == describe(tmp_path / "weights.bin")
    assert entry.size == sum(map(len, pieces))


def test_arrays_are_written_as_their_bytes(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float16).reshape(3, 4)
    with HashedFile(tmp_path / "weights.bin") as file:
        file.write(array.view(np.uint8).data)
        entry = file.entry()
    assert (tmp_path / "weights.bin").read_bytes() == array.tobytes()
    assert entry == describe(tmp_path / "weights.bin")


def test_it_is_closed_at_the_end(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "weights.bin") as file:
        file.write(bytes(1_000_000))
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")
