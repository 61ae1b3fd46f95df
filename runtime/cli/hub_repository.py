"""Bundles on the Hugging Face hub: upload, download, model card."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..bundle.files import CHECKSUM_FILE, MANIFEST_FILE
from ..bundle.manifest import Manifest, parse_manifest
from ..bundle.open import HUB_ID, open_bundle
from ..bundle.replace import replacing
from ..errors import BundleError, MarsError, SessionError
from ..machine import cache_dir

CARD = "README.md"


def push(path: str | Path, repo: str, *, private: bool = False, licence: str | None = None) -> str:
    """Upload the bundle at `path` to the model repository `repo`, with a model card if it has none. Of the
    other files, it deletes the ones that the previous manifest of the repository lists.

    Returns the URL of the commit. Raises BundleError.
    """
    hub, bundle = _library(), open_bundle(path, full=True)
    with _hub_errors(f"{repo}: cannot be pushed to"):
        hub.create_repo(repo, private=private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo, folder_path=bundle.path, delete_patterns=_old_files(hub, repo)
        )
        if not hub.file_exists(repo, CARD):
            card(hub, bundle.manifest, repo, licence).push_to_hub(repo)
    return str(commit.commit_url)


def _old_files(hub: Any, repo: str) -> list[str]:
    """The files of the bundle in `repo`; none if it has no manifest that this version reads."""
    if not hub.file_exists(repo, MANIFEST_FILE):
        return []
    with TemporaryDirectory() as scratch:
        hub.snapshot_download(repo, local_dir=scratch, allow_patterns=[MANIFEST_FILE])
        text = (Path(scratch) / MANIFEST_FILE).read_text("utf-8", "replace")
    try:
        return [entry.path for entry in parse_manifest(text, f"{repo}/{MANIFEST_FILE}").files]
    except BundleError:
        return []


def pull(repo: str, output: str | Path, *, revision: str | None = None) -> Manifest:
    """Download the bundle in `repo` to the new directory `output`, all hashes checked. Raises BundleError."""
    hub, target = _library(), Path(output).expanduser()
    if target.exists():
        raise BundleError(f"{output} exists; choose another directory with -o")
    try:
        with replacing(target) as scratch, _hub_errors(f"{repo}: cannot be pulled"):
            names = [MANIFEST_FILE, CHECKSUM_FILE]
            hub.snapshot_download(repo, revision=revision, local_dir=scratch, allow_patterns=names)
            if not (scratch / MANIFEST_FILE).is_file():
                raise BundleError(f"{repo}: not a bundle: it has no {MANIFEST_FILE}; export a checkpoint")
            text = (scratch / MANIFEST_FILE).read_text("utf-8", "replace")
            names += [entry.path for entry in parse_manifest(text, f"{repo}/{MANIFEST_FILE}").files]
            hub.snapshot_download(repo, revision=revision, local_dir=scratch, allow_patterns=names)
            shutil.rmtree(scratch / ".cache", ignore_errors=True)  # of huggingface_hub
            return open_bundle(scratch, full=True, name=target).manifest
    except OSError as error:
        raise BundleError(f"{output}: cannot be written ({error.strerror})") from error


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


def card(hub: Any, manifest: Manifest, repo: str, licence: str | None) -> Any:
    """The model card of a bundle at `repo`; `licence` is an identifier such as `apache-2.0`."""
    source = manifest.source
    data = hub.ModelCardData(
        library_name="mars-export",
        pipeline_tag="text-generation",
        license=licence,
        base_model=source if HUB_ID.fullmatch(source) else None,
        tags=["mars-export", "multi-token"],
    )
    name = repo.rpartition("/")[2]
    rows = [
        f"| {v.name} | {v.backend} | {v.precision} | {v.drift.max_logit_error if v.drift else ''} |"
        for v in manifest.variants
    ]
    return hub.ModelCard(
        f"""---
{data.to_yaml()}
---
# {name}

A bundle of mars-export ({manifest.producer}), made from `{Path(source).name}`: an ONNX step graph
that accepts several tokens in one forward.

```
mars-export pull {repo} -o {name}.bundle
mars-export chat {name}.bundle
```

| variant | backend | weights | largest logit error |
|---|---|---|---|
"""
        + "\n".join(rows)
    )


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise SessionError("huggingface_hub is not installed; pip install 'mars-export[hub]'") from error
    return huggingface_hub


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn the many errors of the hub and its library into a BundleError."""
    try:
        yield
    except (MarsError, KeyboardInterrupt):
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:500]
        raise BundleError(
            f"{what}: {type(error).__name__}: {words}\n  check the name and the network; for a private"
            " repository, or to write, log in: hf auth login"
        ) from error
