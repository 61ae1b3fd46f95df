"""Downloads bundles: from the Hugging Face hub, and from release files, which are tar archives at a URL or
path with their hashes in SHA256SUMS beside them.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from ..bundle.files import CHECKSUM_FILE, MANIFEST_FILE, SAFE_NAME, replacing, sha256_of
from ..bundle.manifest import Manifest, parse_manifest
from ..bundle.open import HUB_ID, open_bundle
from ..errors import BundleError, MarsError, SessionError
from ..machine import cache_dir

SUMS, SUMS_LIMIT = "SHA256SUMS", 1_000_000
SECONDS = 60  # without a byte
LINE = re.compile(r"(?P<sha256>[0-9a-f]{64}) [ *](?P<name>\S+)")


def is_release_file(source: str) -> bool:
    """Whether `source` is a URL or an archive, not a repository of the hub."""
    return "://" in source or source.endswith(".tar")


def default_name(source: str) -> str:
    """`small.bundle` for `https://host/v1/small.bundle.tar` and `me/small`."""
    name = source.partition("?")[0].rpartition("/")[2] if is_release_file(source) else source.split("/")[-1]
    return name.removesuffix(".tar").removesuffix(".bundle") + ".bundle"


def pull(source: str, output: Path, *, revision: str | None = None, sha256: str | None = None) -> Manifest:
    """Write the bundle of a repository or a release file to the new directory `output`, which appears after
    all hashes are checked. `sha256` is an archive's, by default from SHA256SUMS beside it.

    Raises BundleError.
    """
    target = output.expanduser()
    if target.exists():
        raise BundleError(f"{output} exists; choose another directory with -o")
    try:
        with replacing(target) as scratch:
            if is_release_file(source):
                _extract(source, scratch, sha256)
            else:
                _download(source, scratch, revision)
            try:
                return open_bundle(scratch, full=True, name=target).manifest
            except BundleError as error:
                raise BundleError(str(error).replace(str(scratch), source)) from error
    except (OSError, HTTPException, ValueError, tarfile.TarError) as error:
        raise BundleError(f"{source}: cannot be pulled: {type(error).__name__}: {error}") from error


def pull_once(repo: str) -> Path:
    """The bundle in `repo`, in the user's cache directory, where it is pulled to the first time.

    Raises BundleError.
    """
    if not HUB_ID.fullmatch(repo):
        raise BundleError(f"hub:{repo}: hub:OWNER/NAME is expected")
    if (cache := cache_dir()) is None:
        raise BundleError(f"hub:{repo}: no cache directory; set MARS_EXPORT_CACHE, or pull it yourself")
    target = cache / "bundles" / f"{repo}.bundle"
    if not target.exists():
        pull(repo, target)
    return target


def _download(repo: str, scratch: Path, revision: str | None) -> None:
    """Download the manifest of a repository, then the files that it lists."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise SessionError("huggingface_hub is not installed; pip install 'mars-export[hub]'") from error
    try:
        names = [MANIFEST_FILE, CHECKSUM_FILE]
        hub.snapshot_download(repo, revision=revision, local_dir=scratch, allow_patterns=names)
        if not (scratch / MANIFEST_FILE).is_file():
            raise BundleError(f"{repo}: not a bundle: it has no {MANIFEST_FILE}; export a checkpoint")
        text = (scratch / MANIFEST_FILE).read_text("utf-8", "replace")
        names = [entry.path for entry in parse_manifest(text, f"{repo}/{MANIFEST_FILE}").files]
        hub.snapshot_download(repo, revision=revision, local_dir=scratch, allow_patterns=names)
        shutil.rmtree(scratch / ".cache", ignore_errors=True)  # of huggingface_hub
    except MarsError:
        raise
    except Exception as error:  # the hub and its library have many
        words = " ".join(str(error).split())[:500]
        raise BundleError(
            f"{repo}: cannot be pulled: {type(error).__name__}: {words}\n  check the name and the network;"
            " for a private repository, log in: hf auth login"
        ) from error


def _extract(source: str, scratch: Path, sha256: str | None) -> None:
    """Write the files of an archive with one directory. Links, sparse files and other names are errors."""
    expected = (sha256 or _listed_hash(source)).lower()
    with _local(source, scratch.parent, is_checked=sha256 is not None) as file:
        if (found := sha256_of(file)) != expected:
            raise BundleError(f"{source}: its SHA-256 is {found}, not {expected}; download it again")
        file.seek(0)
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


@contextmanager
def _local(source: str, folder: Path | None = None, *, is_checked: bool) -> Iterator[Any]:
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
        with _local(place, is_checked=False) as file:
            text = file.read(SUMS_LIMIT).decode("utf-8", "replace")
    except OSError as error:
        raise BundleError(f"{place}: {error}; give the archive's hash with --sha256") from error
    hashes = {found["name"]: found["sha256"] for found in map(LINE.fullmatch, text.splitlines()) if found}
    if name not in hashes:
        raise BundleError(f"{place} has no hash of {name}; give it with --sha256")
    return hashes[name]
