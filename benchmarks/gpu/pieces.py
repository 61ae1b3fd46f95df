"""Cuts files into small pieces to carry, and joins the pieces when all have arrived.

The files are one tar file, cut every `size` bytes. Pieces may arrive in any order; a list has their hashes.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

LIST, WHOLE = "pieces.json", "whole.tar"
SIZE = 25 << 20


class PiecesError(Exception):
    """Pieces that are not what their list says."""


def cut(sources: Sequence[tuple[str, Path]], folder: Path, size: int = SIZE) -> list[str]:
    """Write the files, each as (path below the target, where it lies now), as pieces and a list into an empty
    or absent folder. Returns the names of the pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise PiecesError(f"{folder} is not empty; remove it, or give another")
    whole = folder / WHOLE
    with tarfile.open(whole, "w") as tar:
        for name, source in sources:
            tar.add(source, name)
    hashes: dict[str, str] = {}
    with whole.open("rb") as file:
        while data := file.read(size):
            name = f"piece-{len(hashes):03d}"
            (folder / name).write_bytes(data)
            hashes[name] = hashlib.sha256(data).hexdigest()
    whole.unlink()
    (folder / LIST).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    return list(hashes)


def join(folder: Path, target: Path) -> list[str]:
    """Unpack the files below `target` if all pieces are in `folder`. Returns the names of the missing ones.

    Raises PiecesError for an absent list, and for pieces whose hash is wrong.
    """
    try:
        hashes = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PiecesError(f"{folder / LIST}: no list of pieces ({error})") from error
    here = [name for name in hashes if (folder / name).exists()]
    wrong = [
        name for name in here if hashlib.sha256((folder / name).read_bytes()).hexdigest() != hashes[name]
    ]
    if wrong:
        raise PiecesError(f"arrived damaged, send again: {', '.join(wrong)}")
    if len(here) < len(hashes):
        return [name for name in hashes if name not in here]
    target.mkdir(parents=True, exist_ok=True)
    whole = target / WHOLE
    with whole.open("wb") as file:
        for name in hashes:
            file.write((folder / name).read_bytes())
    with tarfile.open(whole) as tar:
        tar.extractall(target, filter="data")
    whole.unlink()
    return []
