"""A bundle on disk: a directory with a valid manifest and the files it lists, opened, and changed by one
writer at a time.

Knows renames, checksums and locks; what is in a manifest is manifest.py's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BundleError
from .files import clear_leftovers, locked, read_small, verify, write_whole
from .held import Held
from .manifest import MANIFEST_FILE, Manifest, Variant, parse_manifest
from .safe import check_sizes

CHECKSUM_FILE = "manifest.sha256"
MANIFEST_LIMIT, CHECKSUM_LIMIT = 16_000_000, 1000  # bytes
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WRITERS_WAIT = 30.0  # seconds, for one another
MOST_ATTEMPTS = 20  # to open a bundle that is written to meanwhile


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: a directory whose manifest is valid and whose files are the ones it lists.

    `held`: that directory, kept open; None for a bundle that was not read from one.
    """

    path: Path
    manifest: Manifest
    held: Held | None = field(default=None, compare=False, repr=False)

    def variant(self, name: str) -> Variant:
        for variant in self.manifest.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.manifest.variants)
        raise BundleError(f"{self.path}: no variant `{name}` (there are: {known})")

    def place(self, name: str) -> Path:
        """Where a file of the directory that was verified is opened, whatever has its name by now."""
        return (self.path if self.held is None else self.held.place) / name

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file. Raises OSError, and ValueError where its hash is not the manifest's."""
        data = read_small(self.place(name), limit, links=True)
        entry = next(entry for entry in self.manifest.files if entry.path == name)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ValueError("it was changed while the bundle was opened")
        return data

    @property
    def changed(self) -> list[str]:
        """Files that are not as they were when they were verified: what was read of them in between may not
        be what the manifest says.
        """
        return [] if self.held is None else self.held.changed()


def open_bundle(path: str | Path, *, full: bool = False, safe: bool = False) -> Bundle:
    """Open and check a bundle directory. `full` hashes every file even if it was found good before. `safe`,
    for a bundle that may be anybody's, does so too, remembers nothing, and has stricter limits.

    Raises BundleError with everything that is wrong: not a bundle, a newer format, a bad manifest, unsafe
    file names, files that are missing, of the wrong size or of the wrong content.
    """
    directory = Path(path).expanduser()
    file = directory / MANIFEST_FILE
    if not file.is_file():
        raise BundleError(_no_bundle(str(path), directory))
    held, attempts = Held(directory), 0
    data, is_vouched_for = _read(held)
    while True:
        try:
            manifest = parse_manifest(data.decode("utf-8"), str(file))
        except UnicodeDecodeError as error:
            raise BundleError(f"{file}: not readable ({error})") from error
        if not is_vouched_for:
            raise BundleError(
                f"{directory}: {MANIFEST_FILE} does not match {CHECKSUM_FILE}; copy or export the bundle"
                " again"
            )
        if safe:
            sizes = {entry.path: entry.size for entry in manifest.files}
            tokenizer = manifest.text.tokenizer if manifest.text is not None else None
            check_sizes(len(data), sizes, manifest.graphs, tokenizer, str(directory))
        try:
            verify(held, manifest.files, manifest.graphs, full=full, safe=safe)
            return Bundle(directory, manifest, held)
        except BundleError:
            # A writer may have taken a file away meanwhile, with what lists it, or the whole directory.
            old, before, attempts = held, data, attempts + 1
            held = Held(directory)
            data, is_vouched_for = _read(held)
            if (data == before and held.is_same(old)) or attempts == MOST_ATTEMPTS:
                raise


def _no_bundle(path: str, directory: Path) -> str:
    """What lies there instead, and what to do."""
    if (directory / "config.json").is_file() or (directory / "adapter_config.json").is_file():
        what = "a checkpoint, not a bundle; export it first"
    elif directory.suffix == ".gguf":
        what = "a GGUF checkpoint, not a bundle; export it first"
    elif directory.is_file():
        return f"{path}: a file, not a bundle; `mars-export unpack {path}` if `mars-export pack` wrote it"
    elif directory.is_dir():
        what = "not a bundle: it has no manifest.json"
    elif HUB_ID.fullmatch(path) and directory.suffix != ".bundle":
        what = "no such bundle; if this is a checkpoint on the hub, export it first"
    else:
        return f"{path}: no such bundle; make one with `mars-export onnx CHECKPOINT -o {path}`"
    if what.endswith("json"):
        return f"{path}: {what}; make one with `mars-export onnx CHECKPOINT -o BUNDLE`"
    return f"{path}: {what}: `mars-export onnx {path} -o mars.bundle`"


def _read(held: Held) -> tuple[bytes, bool]:
    """The manifest's bytes, and whether the checksum is theirs.

    A writer may be at work between the two: then read again.
    """
    file, before = held.directory / MANIFEST_FILE, b""
    while True:
        try:
            data = read_small(held.place / MANIFEST_FILE, MANIFEST_LIMIT)
        except OSError as error:
            raise BundleError(f"{file}: not readable ({error})") from error
        if len(data) > MANIFEST_LIMIT:
            raise BundleError(f"{file}: larger than {MANIFEST_LIMIT} bytes; this is not a manifest")
        is_vouched_for = _checksum_line(data) in _read_checksums(held.place)
        if is_vouched_for or data == before:
            return data, is_vouched_for
        before = data


@contextmanager
def changing(directory: Path) -> Iterator[Manifest]:
    """The manifest of a bundle that nobody else changes meanwhile: read, change and write it in here.

    Raises BundleError when another program does not let go of it. What a writer that was killed left beside
    the bundle's files goes first.
    """
    with locked(directory, WRITERS_WAIT) as is_alone:
        manifest = open_bundle(directory).manifest
        if is_alone:
            clear_leftovers(directory, {entry.path for entry in manifest.files})
        yield manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` and its checksum, each by renaming a finished file.

    Two renames cannot be one, so the checksum file vouches for the old and the new manifest while they change
    places: a crash at any point leaves a bundle that opens.
    """
    data = manifest.to_json().encode("utf-8")
    if len(data) > MANIFEST_LIMIT:
        raise BundleError(
            f"{directory}: the manifest would be larger than {MANIFEST_LIMIT} bytes;"
            " remove profiles that are no longer needed"
        )
    fresh = _checksum_line(data)
    try:
        file = directory / MANIFEST_FILE
        present = _checksum_line(read_small(file, MANIFEST_LIMIT)) if file.is_file() else ""
        write_whole(directory / CHECKSUM_FILE, (present + fresh).encode("ascii"))
        write_whole(file, data)
        write_whole(directory / CHECKSUM_FILE, fresh.encode("ascii"))
    except OSError as error:
        raise BundleError(
            f"{directory}: the manifest cannot be written ({error.strerror}); nothing is damaged"
        ) from error


def _checksum_line(data: bytes) -> str:
    """What `sha256sum manifest.json` prints."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST_FILE}\n"


def _read_checksums(directory: Path) -> list[str]:
    """The lines of the checksum file: one, or two where a rewrite was interrupted."""
    try:
        data = read_small(directory / CHECKSUM_FILE, CHECKSUM_LIMIT)
    except OSError:
        return []
    return data[:CHECKSUM_LIMIT].decode("ascii", "replace").splitlines(keepends=True)
