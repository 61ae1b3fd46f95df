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
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ..runtime.bundle.manifest import MANIFEST_FILE
from ..runtime.errors import ExportError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SCRATCH, OLD = ".partial", ".replaced"  # how the names of scratch directories end
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
        _sweep(target)
    _check(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size + SPARE:
            raise ExportError(
                f"{target.parent}: {size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            )
        scratch, lock = _new_scratch(target)
    except OSError as error:
        raise ExportError(
            f"{target.parent}: cannot be written to ({error.strerror}); give another place with -o"
        ) from error
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
        shutil.rmtree(scratch, ignore_errors=True)
        if lock is not None:
            os.close(lock)


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
        aside = scratch.with_name(scratch.name.removesuffix(SCRATCH) + OLD)
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


def _new_scratch(target: Path) -> tuple[Path, int | None]:
    """An empty directory that is locked for as long as somebody fills it, and the lock; None where there are
    no locks.
    """
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=SCRATCH, dir=target.parent))
        try:
            lock = _lock(scratch)
        except BlockingIOError:
            continue  # another start sweeps it away
        if lock is None or scratch.is_dir():
            return scratch, lock
        os.close(lock)


def _lock(directory: Path) -> int | None:
    """A lock of a directory, None where there are no locks. Raises BlockingIOError when somebody
    else has it.
    """
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def _sweep(target: Path) -> None:
    """Remove what killed runs left beside `target`: scratch directories that nobody has locked.

    An old bundle that was put aside when there was no exchange comes back if nothing took its place.
    """
    ours = re.compile(rf"\.{re.escape(target.name)}-[a-z0-9_]{{8}}({SCRATCH}|{OLD})")
    for path in sorted(target.parent.iterdir(), key=lambda path: path.suffix == SCRATCH):
        found = ours.fullmatch(path.name)
        try:
            lock = _lock(path) if found else None
        except BlockingIOError:
            continue
        if found is None or lock is None:
            continue
        if found[1] == OLD and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


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
