"""Bundles in repositories of the Hugging Face hub: pushed with a card, pulled with every hash checked. The
only file of the runtime that names huggingface_hub.

A repository may be somebody else's: no more is fetched than its manifest lists, under plain names.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .bundle.files import is_safe_name, read_small
from .bundle.manifest import MANIFEST_FILE, Manifest, parse_manifest
from .bundle.open import CHECKSUM_FILE, CHECKSUM_LIMIT, MANIFEST_LIMIT, open_bundle
from .bundle.scratch import ScratchDirectory
from .card import MARK, card
from .errors import BundleError, MarsError, SessionError

CARD = "README.md"
NOT_OURS = {CARD, ".gitattributes"}  # what a new repository has
CARD_LIMIT = 1_000_000  # bytes
INSTALL = "pip install 'mars-export[hub]'"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push made: the commit, where it is seen, and how many files it has."""

    commit: str
    url: str
    num_files: int
    removed: tuple[str, ...]


class Hub:
    """A hub, huggingface.co unless `endpoint` says otherwise (or HF_ENDPOINT). Who asks is known to
    huggingface_hub: `hf auth login`, or HF_TOKEN. `api` is what carries it out.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise SessionError(f"huggingface_hub is not installed; {INSTALL}") from error
        self.api = HfApi(endpoint=endpoint, library_name="mars-export")

    def push(
        self,
        path: str | Path,
        repo: str,
        *,
        private: bool = False,
        licence: str | None = None,
        force: bool = False,
    ) -> Pushed:
        """Put the bundle at `path` into the model repository `repo`, in one commit, and make it if need be.

        A card is written with it, unless there is one that somebody else wrote. Files of the bundle that was
        there go. Raises BundleError for a damaged bundle, for a repository that holds something else unless
        `force`, and for what the hub says.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.utils import RepositoryNotFoundError

        bundle = open_bundle(path, full=True)
        data = read_small(bundle.path / MANIFEST_FILE, MANIFEST_LIMIT)
        vouching = read_small(bundle.path / CHECKSUM_FILE, CHECKSUM_LIMIT)
        with _asking(f"{repo} cannot be pushed to"):
            try:
                info = self.api.repo_info(repo)
            except RepositoryNotFoundError:
                self.api.create_repo(repo, private=private)
                info = self.api.repo_info(repo)
            there = {file.rfilename for file in info.siblings or []}
            if there - NOT_OURS and MANIFEST_FILE not in there and not force:
                raise BundleError(
                    f"{repo} holds other files and no bundle ({', '.join(sorted(there - NOT_OURS)[:3])});"
                    " give another repository, or --force to add the bundle to it"
                )
            add = [CommitOperationAdd(MANIFEST_FILE, data), CommitOperationAdd(CHECKSUM_FILE, vouching)]
            add += [CommitOperationAdd(e.path, str(bundle.path / e.path)) for e in bundle.manifest.files]
            if CARD not in there or MARK in self._small(repo, CARD, info.sha, CARD_LIMIT):
                text = card(bundle.manifest, repo, licence)
                add.append(CommitOperationAdd(CARD, text.encode("utf-8")))
            names = {operation.path_in_repo for operation in add}
            gone = sorted((self._listed(repo, info.sha) if MANIFEST_FILE in there else set()) & there - names)
            made = self.api.create_commit(
                repo,
                [*add, *(CommitOperationDelete(name) for name in gone)],
                commit_message=f"mars-export: {bundle.manifest.producer}, {len(names)} files"[:200],
                parent_commit=info.sha,  # nobody else's push in between is lost
            )
        return Pushed(str(made.oid), str(made.commit_url), len(names), tuple(gone))

    def pull(self, repo: str, output: str | Path, *, revision: str | None = None) -> Manifest:
        """Make the directory `output`, which must not exist, of the bundle in `repo`; all hashes are checked
        before it gets its name.

        Raises BundleError for what is no bundle, and for what the hub says; nothing is left behind then.
        """
        target = Path(output).expanduser()
        if target.exists() or target.is_symlink():
            raise BundleError(f"{output} exists; give another place with -o")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            place = ScratchDirectory(target)
        except OSError as error:
            raise BundleError(f"{target.parent}: cannot be written to ({error.strerror})") from error
        scratch = place.path
        try:
            with _asking(f"{repo} cannot be pulled"):
                self._fetch(repo, revision, scratch)
            shutil.rmtree(scratch / ".cache", ignore_errors=True)  # huggingface_hub's own notes
            manifest = open_bundle(scratch, full=True).manifest
            scratch.chmod(0o755)
            os.rename(scratch, target)
        except BundleError as error:
            raise BundleError(str(error).replace(str(scratch), repo)) from error
        except OSError as error:
            raise BundleError(f"{output}: cannot be written ({error.strerror})") from error
        finally:
            place.remove()
        return manifest

    def _fetch(self, repo: str, revision: str | None, scratch: Path) -> None:
        info = self.api.repo_info(repo, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        if MANIFEST_FILE not in sizes:
            raise BundleError(
                f"{repo}: no bundle: it has no {MANIFEST_FILE}; if it is a checkpoint, export it"
            )
        for name, limit in ((MANIFEST_FILE, MANIFEST_LIMIT), (CHECKSUM_FILE, CHECKSUM_LIMIT)):
            if (sizes.get(name) or 0) > limit:
                raise BundleError(f"{repo}: {name} has {sizes[name]} bytes; this is no bundle")
            self._download(repo, name, info.sha, scratch)
        text = read_small(scratch / MANIFEST_FILE, MANIFEST_LIMIT).decode("utf-8", "replace")
        manifest = parse_manifest(text, f"{repo}/{MANIFEST_FILE}")
        wrong = [
            f"{e.path}: {sizes.get(e.path, 'missing')}, the manifest says {e.size}"
            for e in manifest.files
            if e.path not in sizes or sizes[e.path] not in (None, e.size)
        ]
        if wrong:
            raise BundleError(f"{repo}: incomplete: {'; '.join(wrong[:5])}; push it again")
        needed, free = sum(e.size for e in manifest.files), shutil.disk_usage(scratch).free
        if needed > free:
            raise BundleError(f"{repo}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
        for entry in manifest.files:
            self._download(repo, entry.path, info.sha, scratch)

    def _download(self, repo: str, name: str, revision: str | None, directory: Path) -> Path:
        assert is_safe_name(name)
        return Path(self.api.hf_hub_download(repo, name, revision=revision, local_dir=directory))

    def _small(self, repo: str, name: str, revision: str | None, limit: int) -> str:
        """The beginning of a small file of the repository."""
        with tempfile.TemporaryDirectory(prefix="mars-export-") as place:
            return read_small(self._download(repo, name, revision, Path(place)), limit).decode(
                "utf-8", "replace"
            )

    def _listed(self, repo: str, revision: str | None) -> set[str]:
        """The files of the bundle that is there; none where its manifest cannot be read."""
        text = self._small(repo, MANIFEST_FILE, revision, MANIFEST_LIMIT)
        try:
            return {entry.path for entry in parse_manifest(text, MANIFEST_FILE).files}
        except BundleError:
            return set()


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """What the hub and its library raise, of many classes, as one of ours."""
    try:
        yield
    except (MarsError, KeyboardInterrupt):
        raise
    except Exception as error:
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BundleError(
            f"{what}: {type(error).__name__}: {' '.join(words)[:500]}\n  check the name and the network; for"
            " a private repository, or to write, log in: hf auth login"
        ) from error
