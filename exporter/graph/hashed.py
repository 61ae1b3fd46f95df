"""A file that is hashed while it is written, so that gigabytes need not be read again."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from ...runtime.bundle.files import FileEntry


class HashedFile:
    """A file that is written from start to end.

    The data of a write is hashed in a thread while the next write is prepared, so it must not change
    afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._hashing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._settle()
        self._hashing = self._pool.submit(self._digest.update, data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def entry(self) -> FileEntry:
        """Name, size and hash of what was written."""
        self._settle()
        return FileEntry(self.path.name, self.tell(), self._digest.hexdigest())

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._file.close()

    def _settle(self) -> None:
        """Wait for the hash of the last write, so that at most one write's data is kept in memory."""
        if self._hashing is not None:
            self._hashing.result()
