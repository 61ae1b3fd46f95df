"""Where a bundle is written: a scratch directory beside the target, which takes its place when it is
complete.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..runtime.bundle.manifest import MANIFEST_FILE
from ..runtime.bundle.scratch import DIRECTORY, PARTIAL, ScratchDirectory, abandoned, sweep
from ..runtime.errors import ExportError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OLD = ".replaced"  # how the name of a bundle ends that makes room for another
OLD_NAMES = DIRECTORY.replace(re.escape(PARTIAL), re.escape(OLD))
SPARE = 64 << 20
CURRENT_DIRECTORY, EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


@contextmanager
def replacing(target: Path, size: int, force: bool) -> Iterator[Path]:
    """A scratch directory beside `target`, which becomes it on success and is removed on anything else,
    SIGTERM included.

    What runs that was killed have left there is removed first. Raises ExportError for a target in the way,
    also one that appeared meanwhile, a place that cannot be written, and a disk that is full before or while
    it is filled.
    """
    with suppress(OSError):
        _restore(target)
    sweep(target)
    _check(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size + SPARE:
            raise ExportError(
                f"{target.parent}: {size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            )
        place = ScratchDirectory(target)
    except OSError as error:
        raise ExportError(
            f"{target.parent}: cannot be written to ({error.strerror}); give another place with -o"
        ) from error
    scratch = place.path
    try:
        with _terminable():
            scratch.chmod(0o755)
            yield scratch
            _check(target, force)
            _put(scratch, target)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ExportError(
            f"{target}: {error.strerror}; make room and export again. What was there before is unchanged"
        ) from error
    finally:
        place.remove()


def _check(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise ExportError(f"{target} exists; give --force to replace it")
    if not (target / MANIFEST_FILE).is_file():
        raise ExportError(f"{target} exists and is not a bundle; --force only replaces bundles")


def _put(scratch: Path, target: Path) -> None:
    """Rename `scratch` to `target`.

    A bundle that is there is under the name `scratch` afterwards, or stays where it is.
    """
    if not target.exists():
        try:
            os.rename(scratch, target)  # never over a directory with something in it
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise ExportError(
                    f"{target} appeared during the export; give --force to replace it"
                ) from error
            raise
    elif not _exchanged(scratch, target):
        aside = scratch.with_name(scratch.name.removesuffix(PARTIAL) + OLD)
        os.rename(target, aside)
        try:
            os.rename(scratch, target)
        except BaseException:
            os.rename(aside, target)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two directories change places at once; False where the system cannot do that."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here = ctypes.c_int(CURRENT_DIRECTORY)
    if not renameat2(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(EXCHANGE)):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _restore(target: Path) -> None:
    """An old bundle that a killed run had put aside, where there was no exchange, comes back if nothing took
    its place, and goes otherwise.
    """
    for path in abandoned(target, OLD_NAMES):
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, target)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the program as an exception does, so that what it began is cleaned away; only where nobody
    handles it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
