"""What safe mode asks of a bundle that may be anybody's, beyond that it is whole. Reads no file.

docs/security.md says what each limit is for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..errors import BundleError, listed

MANIFEST_LIMIT = 1_000_000  # bytes
GRAPH_LIMIT, TOKENIZER_LIMIT = (
    64_000_000,
    64_000_000,
)  # bytes: both are parsed, which takes several times that
MOST_FILES = 64


REMEDY = "if you trust whoever made it, open it without safe mode (--trust, or safe=False)"


def check_sizes(
    manifest: int, files: Mapping[str, int], graphs: Collection[str], tokenizer: str | None, where: str
) -> None:
    """Raise BundleError for a bundle that is larger than any of ours need be: `manifest` and the values of
    `files` are bytes.
    """
    problems = list(_too_large(manifest, files, graphs, tokenizer))
    if problems:
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
