"""Bundles from release files: tar archives at a URL or path, with their hashes in SHA256SUMS beside them."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

from ..bundle.files import SAFE_NAME, sha256_of
from ..bundle.manifest import Manifest
from ..bundle.open import open_bundle
from ..bundle.replace import replacing
from ..errors import BundleError

SUMS, SUMS_LIMIT = "SHA256SUMS", 1_000_000
SECONDS = 60  # without a byte
LINE = re.compile(r"(?P<sha256>[0-9a-f]{64}) [ *](?P<name>\S+)")


def is_release_file(source: str) -> bool:
    """Whether `source` is a URL or an archive, not a repository of the hub."""
    return "://" in source or source.endswith(".tar")


def default_name(source: str) -> str:
    """`small.bundle` for `https://host/v1/small.bundle.tar`."""
    return (
        source.partition("?")[0].rpartition("/")[2].removesuffix(".tar").removesuffix(".bundle") + ".bundle"
    )


def pull(source: str, output: Path, sha256: str | None = None) -> Manifest:
    """Write the bundle of a release file to the new directory `output`, which appears after all hashes are
    checked: that of the archive (`sha256`, by default from SHA256SUMS beside it) and those of its files.

    Raises BundleError.
    """
    target = output.expanduser()
    if target.exists():
        raise BundleError(f"{output} exists; choose another directory with -o")
    try:
        expected = (sha256 or _listed_hash(source)).lower()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _local(source, target.parent, is_checked=sha256 is not None) as file:
            if (found := sha256_of(file)) != expected:
                raise BundleError(f"{source}: its SHA-256 is {found}, not {expected}; download it again")
            file.seek(0)
            with replacing(target) as scratch:
                _extract(source, file, scratch)
                return _checked(source, scratch, target)
    except (OSError, HTTPException, ValueError, tarfile.TarError) as error:
        raise BundleError(f"{source}: cannot be pulled: {type(error).__name__}: {error}") from error


@contextmanager
def _local(source: str, folder: Path, *, is_checked: bool) -> Iterator[Any]:
    """The file at `source`, or a temporary copy in `folder`. Over plain HTTP a given hash is necessary."""
    if "://" not in source:
        with Path(source).open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(dir=folder) as copy:
        with urlopen(source, timeout=SECONDS) as reply:
            if not is_checked and not reply.url.startswith("https://"):
                raise BundleError(
                    f"{reply.url}: give the archive's hash with --sha256, or a https:// address"
                )
            shutil.copyfileobj(reply, copy, 1 << 20)
        copy.seek(0)
        yield copy


def _listed_hash(source: str) -> str:
    """The hash of `source` in SHA256SUMS beside it."""
    if "://" not in source and not Path(source).exists():
        raise BundleError(f"{source}: no such file; give an archive's path or URL, or OWNER/NAME")
    folder, _, name = source.partition("?")[0].rpartition("/")
    place = f"{folder}/{SUMS}" if "/" in source else SUMS
    try:
        with _local(place, Path(tempfile.gettempdir()), is_checked=False) as file:
            text = file.read(SUMS_LIMIT).decode("utf-8", "replace")
    except OSError as error:
        raise BundleError(f"{place}: {error}; give the archive's hash with --sha256") from error
    hashes = {found["name"]: found["sha256"] for found in map(LINE.fullmatch, text.splitlines()) if found}
    if name not in hashes:
        raise BundleError(f"{place} has no hash of {name}; give it with --sha256")
    return hashes[name]


def _extract(source: str, file: IO[bytes], scratch: Path) -> None:
    """Write the files of an archive with one directory. Links, sparse files and other names are errors."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isdir():
                continue
            *_, name = parts = member.name.removeprefix("./").split("/")
            content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is None or len(parts) != 2 or not SAFE_NAME.fullmatch(name):
                raise BundleError(f"{source}: not a bundle: it has {member.name[:200]!r}")
            with content, (scratch / name).open("xb") as written:
                shutil.copyfileobj(content, written, 1 << 20)


def _checked(source: str, scratch: Path, target: Path) -> Manifest:
    """The manifest of a whole bundle. Raises BundleError, which names the archive, not its temporary copy."""
    try:
        return open_bundle(scratch, full=True, name=target).manifest
    except BundleError as error:
        raise BundleError(str(error).replace(str(scratch), source)) from error
