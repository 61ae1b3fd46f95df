"""Opening a bundle, checking it, and replacing it by a changed copy."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError, listed
from .files import (
    CHECKSUM_FILE,
    MANIFEST_FILE,
    link_or_copy,
    read_small,
    recover,
    replacing,
    stamp,
    verify,
    write_whole,
)
from .manifest import Manifest, Variant, parse_manifest

MANIFEST_LIMIT, CHECKSUM_LIMIT = 16_000_000, 1000  # bytes
# Of safe mode: bytes of the manifest, number of files, bytes of a graph or tokenizer (parsing takes several
# times that).
SAFE_MANIFEST, SAFE_FILES, SAFE_PARSED = 1_000_000, 64, 64_000_000
SAFE_REMEDY = "if you trust its source, open it without safe mode (--trust, or safe=False)"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: a directory whose manifest is valid and whose files are the ones it lists."""

    path: Path
    manifest: Manifest

    def variant(self, name: str) -> Variant:
        for variant in self.manifest.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.manifest.variants)
        raise BundleError(f"{self.path}: no variant `{name}` (there are: {known})", field="variant")


def open_bundle(
    path: str | Path, *, full: bool = False, safe: bool = False, name: Path | None = None
) -> Bundle:
    """Open and check a bundle directory.

    `full` hashes every file, even if it was verified before. `safe`, for a bundle of unknown origin, does the
    same, stores no stamps and has stricter limits. `name` is the path that the directory will be renamed to.

    Raises a BundleError that lists every problem: not a bundle, a newer format, a bad manifest, unsafe file
    names, files that are missing, not listed, of the wrong size or of the wrong content.
    """
    directory = Path(path).expanduser()
    recover(directory)
    if not (directory / MANIFEST_FILE).is_file():
        raise BundleError(_no_bundle(str(path), directory))
    file = directory / MANIFEST_FILE
    try:
        data = read_small(file, MANIFEST_LIMIT, links=True)
        if len(data) > MANIFEST_LIMIT:
            raise BundleError(f"{file}: larger than {MANIFEST_LIMIT} bytes; this is not a manifest")
        manifest = parse_manifest(data.decode("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: not readable ({error})") from error
    if _checksum(directory) != _checksum_line(data):
        raise BundleError(
            f"{directory}: {MANIFEST_FILE} does not match {CHECKSUM_FILE}; copy or export the bundle again"
        )
    if safe and (problems := list(_too_large(manifest, len(data)))):
        raise BundleError(f"{directory}: beyond the limits of safe mode:{listed(problems)}\n  {SAFE_REMEDY}")
    verify(directory, manifest.files, full=full, safe=safe, name=name)
    return Bundle(directory, manifest)


def _too_large(manifest: Manifest, num_bytes: int) -> Iterator[str]:
    """Sizes beyond those of any export; docs/security.md explains each limit."""
    if num_bytes > SAFE_MANIFEST:
        yield f"the manifest has {num_bytes} bytes, {SAFE_MANIFEST} are allowed"
    if len(manifest.files) > SAFE_FILES:
        yield f"there are {len(manifest.files)} files, {SAFE_FILES} are allowed"
    parsed = manifest.graphs | ({manifest.text.tokenizer} if manifest.text is not None else set())
    for entry in manifest.files:
        if entry.path in parsed and entry.size > SAFE_PARSED:
            yield f"{entry.path} has {entry.size} bytes, {SAFE_PARSED} are allowed"


def _no_bundle(path: str, directory: Path) -> str:
    """Describe the thing at `path` that is not a bundle, and say what to do."""
    if (directory / "config.json").is_file() or (directory / "adapter_config.json").is_file():
        what = "a checkpoint, not a bundle; export it first"
    elif directory.suffix == ".gguf":
        what = "a GGUF checkpoint, not a bundle; export it first"
    elif directory.is_file():
        return f"{path}: a file, not a bundle (a directory); unpack an archive with tar first"
    elif directory.is_dir():
        what = "not a bundle: it has no manifest.json"
    elif HUB_ID.fullmatch(path) and directory.suffix != ".bundle":
        what = "no such bundle; if this is a checkpoint on the hub, export it first"
    else:
        return f"{path}: no such bundle; make one with `mars-export onnx CHECKPOINT -o {path}`"
    if what.endswith("json"):
        return f"{path}: {what}; make one with `mars-export onnx CHECKPOINT -o BUNDLE`"
    return f"{path}: {what}: `mars-export onnx {path} -o mars.bundle`"


def rewrite(
    path: str | Path, change: Callable[[Manifest], Manifest], new: Mapping[str, bytes] | None = None
) -> Manifest:
    """Replace a bundle by a copy with a changed manifest. `new` holds the contents of added files; the other
    files become hard links.

    A second writer waits. Raises BundleError and the errors of `change`; the bundle is unchanged then.
    """
    directory, new = Path(os.path.realpath(Path(path).expanduser())), new or {}
    recover(directory)
    if not (directory / MANIFEST_FILE).is_file():
        raise BundleError(_no_bundle(str(path), directory))
    try:
        with replacing(directory) as scratch:
            manifest = change(open_bundle(directory).manifest)
            parse_manifest(manifest.to_json(), str(path))  # raises if the result would not open
            for entry in manifest.files:
                if entry.path in new:
                    write_whole(scratch / entry.path, new[entry.path])
                else:
                    link_or_copy(directory / entry.path, scratch / entry.path)
            write_manifest(scratch, manifest)
        stamp(directory, manifest.files)
    except OSError as error:
        raise BundleError(f"{path}: cannot be written ({error.strerror}); it is unchanged") from error
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` and its checksum. Raises BundleError."""
    data = manifest.to_json().encode("utf-8")
    if len(data) > MANIFEST_LIMIT:
        raise BundleError(
            f"{directory}: the manifest would be larger than {MANIFEST_LIMIT} bytes;"
            " remove profiles that are no longer needed"
        )
    try:
        write_whole(directory / MANIFEST_FILE, data)
        write_whole(directory / CHECKSUM_FILE, _checksum_line(data).encode("ascii"))
    except OSError as error:
        raise BundleError(f"{directory}: the manifest cannot be written ({error.strerror})") from error


def _checksum_line(data: bytes) -> str:
    """The output of `sha256sum manifest.json`."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST_FILE}\n"


def _checksum(directory: Path) -> str:
    try:
        return read_small(directory / CHECKSUM_FILE, CHECKSUM_LIMIT, links=True).decode("ascii", "replace")
    except OSError:
        return ""
