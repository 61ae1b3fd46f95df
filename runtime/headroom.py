"""The memory that limits of this process leave it, asked before what would end it rather than fail.

ONNX Runtime and the tokenizer's library end a process that gets no memory in the wrong place: in a
destructor, in the words of an error, in a thread of a pool. So what takes much is weighed before it begins.
Knows limits and sums, nothing of models. Without a limit it says nothing, and costs two system calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import machine
from .errors import SessionError

try:
    import resource
except ImportError:  # a system without such limits
    resource = None  # type: ignore[assignment]

RESERVE = 4 << 20  # bytes that stay free: an error's words, first blocks of a thread, small things of a step
LARGE = 16 << 20  # a control group is asked about no less: reading it takes as long as a small step
STATM = Path("/proc/self/statm")
STACK = 8 << 20  # of a thread where no limit says
M_MMAP_THRESHOLD, KEPT = -3, 128 << 10  # glibc's name for it, and what it begins with

# Limits of the process: their name in `resource`, the column of `statm` that counts, what a user calls them.
OWN = (
    ("RLIMIT_AS", 0, "the limit on this process's address space (ulimit -v)"),
    ("RLIMIT_DATA", 5, "the limit on this process's data (ulimit -d)"),
)
GROUP = "the memory limit of this process's control group or container"

_GRANTING = threading.RLock()
_granted = 0  # bytes of work that runs, of all sessions


def is_limited() -> bool:
    """Whether this process has a limit of its own: what every step asks."""
    if resource is None:
        return False
    none, get = resource.RLIM_INFINITY, resource.getrlimit
    return get(resource.RLIMIT_AS)[0] != none or get(resource.RLIMIT_DATA)[0] != none


def require(num_bytes: int, what: str, advice: str, *, stacks: int = 0, code: int = 0) -> None:
    """Raise SessionError where a limit leaves less than `num_bytes` and what must stay free besides.

    `what` takes them, as the beginning of a sentence; `advice` is how to need less. Bytes of `stacks` are
    taken and hardly touched, which a control group does not count; those of `code` are no data.
    """
    needed = num_bytes + RESERVE
    with _GRANTING:
        for left, words, is_space in _own():
            own = needed + stacks + (code if is_space else 0)
            if left - _granted < own:
                raise _shortage(own, left, words, what, advice)
        free = machine.group_left() if num_bytes >= LARGE else None
        if free is not None and free - _granted < needed:
            raise _shortage(needed, free, GROUP, what, advice)


@contextmanager
def granted(num_bytes: int, what: str, advice: str) -> Iterator[None]:
    """`require`; and as long as the work runs its bytes count as taken, whether or not it has taken them yet.

    So two steps at once are weighed together, and by more than they take rather than by less.
    """
    global _granted
    taken = 0
    try:
        with _GRANTING:
            require(num_bytes, what, advice)
            _granted += num_bytes
            taken = num_bytes
        yield
    finally:
        with _GRANTING:
            _granted -= taken


def return_freed() -> None:
    """Let memory that is freed go back at once, so that what limits leave is what there is.

    glibc keeps larger and larger blocks to itself otherwise, and what comes to lie between them makes them
    useless: a step of 30 layers took four times what it uses.
    """
    with suppress(AttributeError, OSError, TypeError):  # another library than glibc, another system
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT)


def _begin_anew() -> None:
    """In a forked process: what ran in other threads runs here no more, nor lets go of the lock."""
    global _GRANTING, _granted
    _GRANTING, _granted = threading.RLock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def stacks(threads: int) -> int:
    """Address space of so many threads' stacks."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0] if resource is not None else STACK
    return threads * (soft if 0 < soft <= 1 << 30 else STACK)


def address_space() -> int:
    """Bytes of address space that this process has; 0 where unknown."""
    pages = _pages()
    return int(pages[0]) * mmap.PAGESIZE if pages else 0


def _own() -> Iterator[tuple[int, str, bool]]:
    """Bytes that the process's own limits leave, each limit's name, and whether it is of all addresses."""
    if resource is None:
        return
    pages: list[str] | None = None
    for name, column, words in OWN:
        most = resource.getrlimit(getattr(resource, name))[0]
        if most != resource.RLIM_INFINITY:
            pages = pages or _pages()
            if pages:
                yield most - int(pages[column]) * mmap.PAGESIZE, words, column == 0


def _pages() -> list[str]:
    try:
        return STATM.read_text(encoding="ascii").split()
    except OSError:
        return []


def _shortage(needed: int, left: int, limit: str, what: str, advice: str) -> SessionError:
    beside = " beside what runs already" if _granted else ""
    return SessionError(
        f"not enough memory: {what} needs about {-(-needed // 10**6)} MB, and {limit} leaves"
        f" {max(0, left - _granted) // 10**6} MB{beside}; raise it, or {advice}"
    )
