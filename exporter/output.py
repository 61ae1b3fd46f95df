"""The directory of a new bundle: checked before the work starts, and replaced when the bundle is complete."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..runtime.bundle.files import MANIFEST_FILE, recover, replacing
from ..runtime.errors import ExportError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SPARE = 64 << 20


@contextmanager
def writing(target: Path, size: int, force: bool) -> Iterator[Path]:
    """A directory that becomes `target` on success and is removed on any error.

    Raises ExportError if the target exists, if its parent cannot be written to, or if the disk is too full.
    """
    recover(target)
    _check(target, force)
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(replacing(target))
            free = shutil.disk_usage(scratch).free
        except OSError as error:
            raise ExportError(
                f"{target.parent}: cannot be written to ({error.strerror}); choose another directory with -o"
            ) from error
        if free < size + SPARE:
            raise ExportError(
                f"{target.parent}: {(size + SPARE) / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free"
            )
        try:
            yield scratch
            _check(target, force)
            stack.close()
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise ExportError(
                f"{target}: {error.strerror}; free some space and export again. An earlier"
                " bundle is unchanged"
            ) from error


def _check(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise ExportError(f"{target} exists; give --force to replace it")
    if not (target / MANIFEST_FILE).is_file():
        raise ExportError(f"{target} exists and is not a bundle; --force only replaces bundles")
