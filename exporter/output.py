"""Where a bundle is written: a scratch directory beside the target, renamed to it when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..runtime.bundle.manifest import MANIFEST_FILE
from ..runtime.errors import ExportError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(target: Path, size: int, force: bool) -> Iterator[Path]:
    """A scratch directory beside `target`, renamed to it on success and removed on anything else.

    Raises ExportError for a target in the way, a place that cannot be written, and a disk that is full before or while it is filled.
    """
    if target.exists() and not force:
        raise ExportError(f"{target} exists; give --force to replace it")
    if target.exists() and not (target / MANIFEST_FILE).is_file():
        raise ExportError(f"{target} exists and is not a bundle; --force only replaces bundles")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size + (64 << 20):
            raise ExportError(
                f"{target.parent}: {size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            )
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ExportError(
            f"{target.parent}: cannot be written to ({error.strerror}); give another place with -o"
        ) from error
    try:
        scratch.chmod(0o755)
        yield scratch
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.rename(target, old / "bundle")
            os.rename(scratch, target)
            shutil.rmtree(old)
        else:
            os.rename(scratch, target)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ExportError(
            f"{target}: {error.strerror}; make room and export again. What was there before is unchanged"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
