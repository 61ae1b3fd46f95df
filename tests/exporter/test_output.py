"""Writing a bundle: the hash of a file is what reading it back would give, and a full disk loses nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from mars_export.exporter.graph.hashed import HashedFile
from mars_export.exporter.output import replacing
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import MANIFEST_FILE
from mars_export.runtime.errors import ExportError


@pytest.mark.parametrize(
    "pieces", [[], [b""], [b"a", b"", b"bc"], [bytes(3_000_000), b"x", bytes(range(256)) * 9000]], ids=len
)
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


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, ExportError), (errno.EIO, OSError)])
def test_a_disk_that_fills_up_is_said_and_the_old_bundle_stays(
    number: int, error: type[Exception], tmp_path: Path
) -> None:
    old = tmp_path / "old.bundle"
    old.mkdir()
    (old / MANIFEST_FILE).write_text("{}")
    with pytest.raises(error, match=os.strerror(number)), replacing(old, 0, force=True) as scratch:
        fail(scratch, number)
    assert [path.name for path in tmp_path.rglob("*")] == ["old.bundle", MANIFEST_FILE]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ExportError, match=r"file.*cannot be written to .*another place"),
        replacing(tmp_path / "file" / "x.bundle", 0, force=False),
    ):
        pass


def fail(scratch: Path, number: int) -> None:
    (scratch / "weights.bin").write_bytes(b"half")
    raise OSError(number, os.strerror(number))
