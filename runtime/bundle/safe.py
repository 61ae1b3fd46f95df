"""The limits of safe mode, for bundles of unknown origin. docs/security.md says what each one is for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..errors import BundleError, listed

MANIFEST_LIMIT = 1_000_000  # bytes
GRAPH_LIMIT = TOKENIZER_LIMIT = 64_000_000  # bytes; parsing takes several times that
MOST_FILES = 64
REMEDY = "if you trust its source, open it without safe mode (--trust, or safe=False)"


def check_sizes(
    manifest: int, files: Mapping[str, int], graphs: Collection[str], tokenizer: str | None, where: str
) -> None:
    """Raise BundleError for a bundle that is larger than an export needs. `manifest` and the values of
    `files` are bytes.
    """
    if problems := list(_too_large(manifest, files, graphs, tokenizer)):
        raise BundleError(f"{where}: more than safe mode takes:{listed(problems)}\n  {REMEDY}")


def _too_large(
    manifest: int, files: Mapping[str, int], graphs: Collection[str], tokenizer: str | None
) -> Iterator[str]:
    if manifest > MANIFEST_LIMIT:
        yield f"the manifest has {manifest} bytes, {MANIFEST_LIMIT} are taken"
    if len(files) > MOST_FILES:
        yield f"there are {len(files)} files, {MOST_FILES} are taken"
    for name, size in files.items():
        limits = [GRAPH_LIMIT] * (name in graphs) + [TOKENIZER_LIMIT] * (name == tokenizer)
        if limits and size > min(limits):
            yield f"{name} has {size} bytes, {min(limits)} are taken"
