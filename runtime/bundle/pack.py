"""A bundle as one file, and back: a plain tar that depends on the bundle's content only.

Such a file may be somebody else's: nothing in it is trusted before it was checked, and no more is read or
written than the manifest in it lists. Knows the first 512 bytes of each entry, none of tar's extensions.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tarfile import BLOCKSIZE, GNU_FORMAT, RECORDSIZE, REGTYPE, HeaderError, TarInfo
from typing import BinaryIO

from ..errors import BundleError
from .files import FileEntry, is_safe_name, read_small
from .manifest import MANIFEST_FILE, Manifest, parse_manifest
from .open import CHECKSUM_FILE, MANIFEST_LIMIT, open_bundle
from .scratch import ScratchDirectory, scratch_file

PIECE = 1 << 20
AGAIN = "copy or pack it again"


def pack(path: str | Path, output: str | Path, *, force: bool = False) -> int:
    """Write the bundle at `path` to the file `output`, whole or not at all; returns its size in bytes.

    Two bundles of the same content give the same bytes. Raises BundleError for a bundle that is damaged, and
    for an output that exists unless `force`.
    """
    target = Path(output).expanduser()
    if target.is_dir() or (target.exists() and not force):
        raise BundleError(
            f"{output} exists; give another place" + ("" if target.is_dir() else ", or --force")
        )
    bundle = open_bundle(path, full=True)
    data = read_small(bundle.path / MANIFEST_FILE, MANIFEST_LIMIT)
    line = f"{hashlib.sha256(data).hexdigest()}  {MANIFEST_FILE}\n".encode("ascii")
    try:
        with scratch_file(target) as (scratch, file):
            for name, content in ((MANIFEST_FILE, data), (CHECKSUM_FILE, line)):
                file.write(_header(name, len(content)) + content + _padding(len(content)))
            for entry in sorted(bundle.manifest.files, key=lambda entry: entry.path):
                file.write(_header(entry.path, entry.size))
                _copy(bundle.path / entry.path, entry, file)
                file.write(_padding(entry.size))
            file.write(bytes(2 * BLOCKSIZE))
            file.write(bytes(-file.tell() % RECORDSIZE))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
            scratch.replace(target)
    except OSError as error:
        raise BundleError(f"{output}: cannot be written ({error.strerror}); give another place") from error
    return size


def unpack(archive: str | Path, output: str | Path) -> Manifest:
    """Make the directory `output`, which must not exist, from a file that `pack` wrote; all hashes are
    checked.

    Raises BundleError for anything else than such a file, and leaves nothing behind then.
    """
    source, target = Path(archive).expanduser(), Path(output).expanduser()
    if target.exists() or target.is_symlink():
        raise BundleError(f"{output} exists; give another place with -o")
    if not source.is_file():
        raise BundleError(
            f"{archive}: {'a directory, not a' if source.is_dir() else 'no such'} packed bundle"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = ScratchDirectory(target)
    except OSError as error:
        raise BundleError(f"{target.parent}: cannot be written to ({error.strerror})") from error
    scratch = place.path
    try:
        with source.open("rb") as file:
            _extract(file, scratch, str(archive))
        manifest = open_bundle(scratch, full=True).manifest
        scratch.chmod(0o755)
        os.rename(scratch, target)
    except OSError as error:
        raise BundleError(f"{archive}: cannot be unpacked to {output} ({error.strerror})") from error
    except BundleError as error:
        raise BundleError(str(error).replace(str(scratch), str(archive))) from error
    finally:
        place.remove()
    return manifest


def _extract(file: BinaryIO, scratch: Path, where: str) -> None:
    """The manifest comes first; from then on only what it lists is read, each file once and of its size."""
    entries = _entries(file, where)
    for name, limit in ((MANIFEST_FILE, MANIFEST_LIMIT), (CHECKSUM_FILE, MANIFEST_LIMIT)):
        found, size = next(entries, ("", 0))
        if found != name:
            raise BundleError(f"{where}: not a packed bundle: {name} is not where it should be; {AGAIN}")
        if size > limit:
            raise BundleError(f"{where}: {name} has {size} bytes; this is not a packed bundle")
        (scratch / name).write_bytes(_exactly(file, size, where))
    manifest = parse_manifest((scratch / MANIFEST_FILE).read_bytes().decode("utf-8", "replace"), where)
    sizes = {entry.path: entry.size for entry in manifest.files}
    free = shutil.disk_usage(scratch).free
    if sum(sizes.values()) > free:
        raise BundleError(
            f"{where}: {sum(sizes.values()) / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
        )
    for name, size in entries:
        if sizes.pop(name, None) != size:
            raise BundleError(
                f"{where}: `{name[:80]}` of {size} bytes is not what its manifest lists; {AGAIN}"
            )
        with (scratch / name).open("xb") as out:
            left = size
            while left:
                piece = _exactly(file, min(PIECE, left), where)
                out.write(piece)
                left -= len(piece)
    if sizes:
        raise BundleError(f"{where}: {', '.join(sorted(sizes)[:5])} missing; {AGAIN}")


def _entries(file: BinaryIO, where: str) -> Iterator[tuple[str, int]]:
    """Names and sizes; whoever asks for the next one has read this one's content."""
    while True:
        block = _exactly(file, BLOCKSIZE, where)
        if not any(block):
            return
        try:
            info = TarInfo.frombuf(block, "ascii", "strict")
        except (HeaderError, UnicodeDecodeError) as error:
            raise BundleError(f"{where}: not a packed bundle ({error}); {AGAIN}") from error
        if info.type != REGTYPE or not is_safe_name(info.name) or info.size < 0:
            raise BundleError(
                f"{where}: {info.name[:80]!r} is not a plain file with a plain name;"
                " `mars-export pack` wrote no such thing"
            )
        yield info.name, info.size
        _exactly(file, len(_padding(info.size)), where)


def _exactly(file: BinaryIO, size: int, where: str) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise BundleError(f"{where}: it ends too soon; {AGAIN}")
    return data


def _copy(path: Path, entry: FileEntry, out: BinaryIO) -> None:
    """The content of a file of the bundle. Raises BundleError if it is no longer what was checked."""
    digest, left = hashlib.sha256(), entry.size
    with path.open("rb") as file:
        while left and (piece := file.read(min(PIECE, left))):
            digest.update(piece)
            out.write(piece)
            left -= len(piece)
    if left or digest.hexdigest() != entry.sha256:
        raise BundleError(f"{path}: it was changed while the bundle was packed; pack it again")


def _header(name: str, size: int) -> bytes:
    info = TarInfo(name)
    info.size, info.mode = size, 0o644  # no owner, no time: the same bytes everywhere
    header = info.tobuf(GNU_FORMAT, "ascii", "strict")
    if len(header) != BLOCKSIZE:
        raise BundleError(f"{name[:80]}...: a name of {len(name)} characters does not fit; 100 is the most")
    return header


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCKSIZE)
