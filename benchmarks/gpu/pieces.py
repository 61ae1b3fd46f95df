"""Cuts files into small pieces to carry, and joins the pieces that have arrived.

All files together are one sequence of bytes, cut every `size` bytes. Pieces may arrive in any order and at
any time: each is written to its place, and a file is complete when its hash is right.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

LIST, DONE = "pieces.json", "joined.json"
SIZE = 25 << 20
CHUNK = 1 << 20


class PiecesError(Exception):
    """Pieces that are not what their list says."""


@dataclass(frozen=True, slots=True)
class File:
    """A file in the run of bytes: its place below the target folder, where it begins, its length and hash."""

    path: str
    start: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What the pieces hold; `hashes` are the pieces' own, in order."""

    size: int
    files: tuple[File, ...]
    hashes: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(file.length for file in self.files)


def piece_name(number: int) -> str:
    return f"piece-{number:03d}"


def cut(sources: Sequence[tuple[str, Path]], folder: Path, size: int = SIZE) -> Contents:
    """Write the files, each as (path below the target, where it lies now), as pieces and a list into an empty
    or absent folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise PiecesError(f"{folder} is not empty; remove it, or give another")
    files, hashes, start = [], [], 0
    buffer = bytearray()
    for name, source in sources:
        whole = hashlib.sha256()
        length = 0
        for block in _blocks(source):
            whole.update(block)
            length += len(block)
            buffer += block
            while len(buffer) >= size:
                hashes.append(_write_piece(folder, len(hashes), bytes(buffer[:size])))
                del buffer[:size]
        files.append(File(name, start, length, whole.hexdigest()))
        start += length
    if buffer:
        hashes.append(_write_piece(folder, len(hashes), bytes(buffer)))
    contents = Contents(size, tuple(files), tuple(hashes))
    (folder / LIST).write_text(json.dumps(asdict(contents), indent=1) + "\n", encoding="utf-8")
    return contents


def read_list(folder: Path) -> Contents:
    """Raises PiecesError for a list that is absent or makes no sense."""
    try:
        raw = json.loads((folder / LIST).read_text(encoding="utf-8"))
        files = tuple(File(**entry) for entry in raw["files"])
        contents = Contents(int(raw["size"]), files, tuple(raw["hashes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PiecesError(f"{folder / LIST}: no list of pieces ({error})") from error
    start = 0
    for file in contents.files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or file.start != start or file.length < 0:
            raise PiecesError(f"{folder / LIST}: {file.path} does not lie where it should")
        start += file.length
    if contents.size < 1 or len(contents.hashes) != -(-start // contents.size):
        raise PiecesError(f"{folder / LIST}: {len(contents.hashes)} pieces cannot hold {start} bytes")
    return contents


@dataclass(frozen=True, slots=True)
class Joined:
    """What is there by now: finished files, those that still wait, and the pieces they wait for."""

    finished: tuple[str, ...]
    waiting: tuple[str, ...]
    missing: tuple[str, ...]


def join(folder: Path, target: Path) -> Joined:
    """Take the pieces in `folder` into files below `target`; those that were taken before may be gone.

    Raises PiecesError for a piece whose hash is wrong: it is named, and what is right is kept.
    """
    contents = read_list(folder)
    target.mkdir(parents=True, exist_ok=True)
    done = _done(target, contents)
    wrong = []
    for number, expected in enumerate(contents.hashes):
        path = folder / piece_name(number)
        if number in done or not path.exists():
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != expected:
            wrong.append(path.name)
            continue
        for file in contents.files:
            _place(target, file, number * contents.size, data)
        done.add(number)
        _note(target, contents, done)
    finished = [file for file in contents.files if _is_finished(target, file, contents.size, done)]
    if wrong:
        raise PiecesError(f"arrived damaged, send again: {', '.join(wrong)}")
    missing = tuple(piece_name(n) for n in range(len(contents.hashes)) if n not in done)
    waiting = tuple(file.path for file in contents.files if file not in finished)
    return Joined(tuple(file.path for file in finished), waiting, missing)


def _place(target: Path, file: File, begin: int, data: bytes) -> None:
    """The part of a piece, which begins at `begin` of the run, that belongs to `file`."""
    first, last = max(begin, file.start), min(begin + len(data), file.start + file.length)
    if first >= last and not (file.length == 0 and begin <= file.start <= begin + len(data)):
        return
    part = _part(target, file)
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as out:
        out.seek(first - file.start)
        out.write(data[first - begin : max(first, last) - begin])


def _is_finished(target: Path, file: File, size: int, done: set[int]) -> bool:
    final = target / file.path
    if final.is_file() and final.stat().st_size == file.length:
        return True
    last = max(file.start, file.start + file.length - 1)
    part = _part(target, file)
    if not part.exists() or any(n not in done for n in range(file.start // size, last // size + 1)):
        return False
    whole = hashlib.sha256()
    for block in _blocks(part):
        whole.update(block)
    if whole.hexdigest() != file.sha256:
        raise PiecesError(
            f"{file.path}: joined from right pieces, and wrong; remove {target} and begin again"
        )
    os.replace(part, final)
    return True


def _part(target: Path, file: File) -> Path:
    final = target / file.path
    return final.with_name(final.name + ".part")


def _done(target: Path, contents: Contents) -> set[int]:
    """Pieces that were taken before, of this very list."""
    try:
        raw = json.loads((target / DONE).read_text(encoding="utf-8"))
        if raw["hashes"] == list(contents.hashes):
            return set(raw["done"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return set()


def _note(target: Path, contents: Contents, done: set[int]) -> None:
    beside = target / (DONE + ".new")
    beside.write_text(json.dumps({"hashes": contents.hashes, "done": sorted(done)}), encoding="utf-8")
    os.replace(beside, target / DONE)


def _write_piece(folder: Path, number: int, data: bytes) -> str:
    (folder / piece_name(number)).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            yield block
