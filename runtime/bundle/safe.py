"""What safe mode asks of a bundle that may be anybody's, beyond that it is whole. Reads no file.

docs/security.md says what each limit is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import BundleError, listed

if TYPE_CHECKING:
    from .manifest import Manifest

MANIFEST_LIMIT = 1_000_000  # bytes
GRAPH_LIMIT, TOKENIZER_LIMIT = (
    64_000_000,
    64_000_000,
)  # bytes: both are parsed, which takes several times that
MOST_FILES = 64


def check_sizes(manifest: Manifest, num_bytes: int, where: str) -> None:
    """Raise BundleError for a bundle, whose manifest has `num_bytes`, that is larger than any of ours need
    be.
    """
    problems = list(_too_large(manifest, num_bytes))
    if problems:
        raise BundleError(f"{where}: more than safe mode takes:{listed(problems)}\n  {REMEDY}")


REMEDY = "if you trust whoever made it, open it without safe mode (--trust, or safe=False)"


def _too_large(manifest: Manifest, num_bytes: int) -> Iterator[str]:
    if num_bytes > MANIFEST_LIMIT:
        yield f"the manifest has {num_bytes} bytes, {MANIFEST_LIMIT} are taken"
    if len(manifest.files) > MOST_FILES:
        yield f"there are {len(manifest.files)} files, {MOST_FILES} are taken"
    limits = dict.fromkeys(manifest.graphs, GRAPH_LIMIT)
    if manifest.text is not None:
        limits[manifest.text.tokenizer] = TOKENIZER_LIMIT
    for entry in manifest.files:
        most = limits.get(entry.path)
        if most is not None and entry.size > most:
            yield f"{entry.path} has {entry.size} bytes, {most} are taken"
