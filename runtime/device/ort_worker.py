"""One thread for everything that ONNX Runtime does on a GPU while it captures steps. Names no library.

A captured step belongs to the thread that captured it, and a call to CUDA from another thread while a step is
being captured breaks the capture. So all sessions of a process that capture share this thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Lock, get_ident
from typing import Any, TypeVar

Given = TypeVar("Given")


class Worker:
    """A thread that is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._ident: int | None = None

    def run(self, work: Callable[[], Given]) -> Given:
        """What `work` returns or raises, done in the thread. An interrupt of the caller waits for it: its
        memory is the caller's.
        """
        if get_ident() == self._ident:
            return work()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "mars-gpu")
                self._ident = self._pool.submit(get_ident).result()
        done = self._pool.submit(work)
        try:
            return done.result()
        except BaseException:
            wait([done])
            raise


THE_WORKER = Worker()


class OnWorker:
    """A memory (memory.py) whose methods run in a worker's thread."""

    def __init__(self, memory: Any, worker: Worker) -> None:
        self.memory, self._worker = memory, worker
        self.device, self.number = memory.device, memory.number

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.memory, name)
        return lambda *given: self._worker.run(partial(method, *given))
