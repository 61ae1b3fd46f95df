"""A service over one session: submit from any thread or from asyncio, stream, cancel. Owns the thread that
steps a schedule.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import TracebackType

from .decode.config import GenerationConfig
from .decode.row import Accepted, Row
from .decode.schedule import Limits, Schedule
from .errors import SessionError
from .session import Answer, Completion, Event, Prompt, Session
from .text import TextStream


class Request(Answer):
    """One submitted prompt. Iterate over it, with `for` or `async for`, once; leaving early cancels it.

    Raises in the iteration what ended this request, if it failed.
    """

    def __init__(self, batcher: Batcher, row: Row, text: TextStream | None) -> None:
        super().__init__(row, text)
        self._batcher = batcher
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._over = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Event]:
        try:
            while (event := self._next(wait=True)) is not None:
                yield event
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                with self._changed:
                    ready = loop.create_future()
                    self._wake = (loop, ready)
                    if self._events or self._over:
                        ready.set_result(None)
                await ready
                if (event := self._next(wait=False)) is None:
                    return
                yield event
        finally:
            self.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer. Raises what ended the request, or SessionError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout):
                raise SessionError(
                    f"the answer is not finished after {timeout:g} seconds; it goes on, ask again or cancel it"
                )
        if self._error is not None:
            raise self._error
        return self.completion

    def cancel(self) -> None:
        """End the request; its row is free before the next step. Does nothing to one that has ended."""
        self._batcher._cancel(self)

    @property
    def completion(self) -> Completion:
        """The answer so far; `finish_reason` is "cancelled" while it is not finished. May wait for the step
        in hand.
        """
        with self._batcher._stepping:
            return super().completion

    def _next(self, *, wait: bool) -> Event | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._events or self._over)
            if self._events:
                return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _push(self, accepted: Accepted) -> None:
        event = self._event(accepted)
        with self._changed:
            self._events.append(event)
        self._notify(over=accepted.finish_reason is not None)

    def _notify(self, *, over: bool, error: BaseException | None = None) -> None:
        with self._changed:
            self._over, self._error = self._over or over, self._error or error
            self._changed.notify_all()
            wake, self._wake = self._wake, None
        if wake is not None:
            loop, future = wake
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_complete, future)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Batcher:
    """Continuous batching over one session: requests join and leave at any step, each with its own settings.

    May be used from any number of threads and event loops. A context manager; `close` cancels what still
    runs.
    """

    def __init__(self, session: Session, limits: Limits | None = None) -> None:
        manifest = session.bundle.manifest
        self.session, self.limits = session, limits or Limits()
        # measured before the batcher takes its KV memory: no running row waits for it, and the scratch memory
        # is used again
        _ = session.cost
        self._schedule = Schedule(
            session.backend, manifest.block, manifest.tokens.mask, self.limits, session.policy()
        )
        self._requests: dict[int, Request] = {}
        self._arrivals: deque[Row] = (
            deque()
        )  # submitted, and not yet seen by the thread that owns the schedule
        self._indices = itertools.count()
        self._changed = threading.Condition()
        self._stepping = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mars-batcher", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, wait: float | None = 0
    ) -> Request:
        """Queue a prompt and return at once, or after at most `wait` seconds (None: any time) if too many
        wait already.

        Raises SessionError for a bad prompt or config, a full queue, and a closed batcher. From asyncio, wait
        for room with `await asyncio.to_thread(batcher.submit, prompt, config, wait=None)`.
        """
        row, text = self.session.new_row(next(self._indices), prompt, config or GenerationConfig())
        request = Request(self, row, text)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.num_waiting < self.limits.max_waiting, wait)
            if self._closed:
                raise SessionError("this batcher is closed; make a new one")
            if self.num_waiting >= self.limits.max_waiting:
                raise SessionError(
                    f"{self.num_waiting} requests wait already (max_waiting); try again later, or submit with wait=None"
                )
            self._arrivals.append(row)
            self._requests[row.index] = request
            self._changed.notify_all()
        return request

    @property
    def num_running(self) -> int:
        return self._schedule.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._arrivals) + len(self._schedule.waiting)

    def close(self) -> None:
        """Cancel everything and end the thread; returns when both are done."""
        with self._changed:
            self._closed = True
            for request in list(self._requests.values()):
                self._end(request)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or self._arrivals or not self._schedule.is_idle
                    )
                    if self._closed:
                        return
                    while self._arrivals:
                        self._schedule.add(self._arrivals.popleft())
                self._step()
        except BaseException as error:  # a fault of ours or a library's panic: nobody may wait for ever
            with self._changed:
                self._closed = True
                for request in list(self._requests.values()):
                    request._notify(over=True, error=error)
                self._changed.notify_all()
            raise

    def _step(self) -> None:
        with self._stepping:
            events = self._schedule.step()
            for event in events:
                if event.error is None and (request := self._requests.get(event.row)) is not None:
                    request._push(event)
        with self._changed:
            for event in events:
                if event.finish_reason is None:
                    continue
                request = self._requests.pop(event.row, None)
                if request is not None and event.error is not None:
                    request._notify(over=True, error=event.error)
            self._changed.notify_all()

    def _cancel(self, request: Request) -> None:
        with self._changed:
            if request._row.index in self._requests:
                self._end(request)
                self._changed.notify_all()

    def _end(self, request: Request) -> None:
        if request._row.finish_reason is None:
            request._row.finish_reason = "cancelled"
        self._requests.pop(request._row.index, None)
        request._notify(over=True)


Engine = Batcher  # its name until 0.1; NVIDIA keeps the word
