"""One request to a batcher, as its readers see it: events, the answer so far, how it ended. Runs nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import suppress
from time import monotonic, perf_counter

from ..decode.row import Accepted, FinishReason, Row
from ..errors import SessionError
from ..session.answer import Answer, Completion, Event
from ..text.tokenizer import TextStream

End = Callable[["Request", FinishReason], None]
"""(request, why): what its batcher does to end it"""


class Waiters:
    """Coroutines that wait for something to change. Guarded by whoever owns it."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def join(self) -> asyncio.Future[None]:
        """A future for the next change, of the running loop."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        """Called in any thread."""
        futures, self._futures = self._futures, []
        for future in futures:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_complete, future)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Request(Answer):
    """One submitted prompt. Iterate over its events once, with `for` or `async for`; leaving early cancels
    it.

    The last event says why it ended; what made it fail is raised instead. `number` counts a batcher's
    requests, `client` is who asked. `tau` and `exact` may be changed while it runs.
    """

    def __init__(
        self,
        row: Row,
        text: TextStream | None,
        end: End,
        deadline: float | None = None,
        client: Hashable = None,
    ) -> None:
        super().__init__(row, text)
        self.number, self.client = row.index, client
        self._end, self._deadline = end, deadline  # of the monotonic clock
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards what is below; never held while a step runs
        self._waiters = Waiters()
        self._events: deque[Event] = deque()
        self._token_ids: list[int] = []
        self._whole, self._shown = "", 0  # the text so far, and how much of it events have
        self._seen = row.stats.copy()
        self._last: FinishReason | None = None  # what the last event says
        self._reason: FinishReason | None = None  # once it is over
        self._error: BaseException | None = None
        self._is_read = self._has_row = False

    # --- for readers, in any thread ---

    def __iter__(self) -> Iterator[Event]:
        self._begin()
        try:
            while (event := self._wait()) is not None:
                yield event
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        self._begin()
        try:
            while True:
                await self._soon(lambda: bool(self._events))
                if (event := self._take()) is None:
                    return
                yield event
        finally:
            self.cancel()

    async def begun(self) -> None:
        """Wait until it has its row, or is over."""
        await self._soon(lambda: self._has_row)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer. Raises what made the request fail, or SessionError after `timeout`
        seconds, when it goes on.
        """
        self._check_process()
        until = None if timeout is None else monotonic() + timeout
        while True:
            left = sooner(self._left(), None if until is None else until - monotonic())
            with self._changed:
                if self._changed.wait_for(lambda: self._reason is not None, left):
                    break
            self._expire()
            if until is not None and monotonic() >= until and self._reason is None:
                raise SessionError(
                    f"the answer is not finished after {timeout:g} seconds; it goes on, ask again or cancel"
                    " it"
                )
        return self._outcome()

    async def aresult(self) -> Completion:
        """The same from a coroutine; `asyncio.wait_for` limits the wait. The request goes on without it."""
        await self._soon(lambda: False)
        return self._outcome()

    def cancel(self) -> None:
        """End the request; its row is free before the next step. Does nothing to one that has ended."""
        self._end(self, "cancelled")

    @property
    def completion(self) -> Completion:
        """The answer so far, which is all that its events have; `finish_reason` is "cancelled" while it is
        not finished. Never waits for a step.
        """
        with self._changed:
            reason = self._reason or "cancelled"
            ids, confidences = tuple(self._token_ids), tuple(self._confidences)
            return Completion(self._whole, ids, confidences, reason, self._seen)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs."""
        return self._reason

    @property
    def error(self) -> BaseException | None:
        """What made it fail, if it did."""
        return self._error

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has come."""
        return self._deadline is not None and monotonic() >= self._deadline

    # --- for its batcher ---

    def start(self) -> None:
        """It has its row. Called in the batcher's thread, before each step."""
        if not self._has_row:
            with self._changed:
                self._has_row = True
                self._wake()

    def deliver(self, accepted: Accepted) -> None:
        """Take in what a step gave. Called in the batcher's thread only: the text grows here."""
        reason = accepted.finish_reason
        event = Event.of(accepted, self._grown(reason))
        whole = self._text.text if self._text is not None else ""
        with self._changed:
            if self._reason is not None:
                return  # ended while the step ran: nobody is told of what came too late
            self._token_ids += accepted.token_ids
            self._confidences += accepted.confidences
            self._whole, self._seen = whole, self._row.stats.copy()
            self._shown += len(event.text)
            self._events.append(event)
            self._last = reason
            self._wake()

    @property
    def last_reason(self) -> FinishReason | None:
        """Why it ended, if a step that was delivered ended it."""
        return self._last

    def conclude(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """It is over, its readers are told. Called once, in any thread."""
        with self._changed:
            self._reason, self._error = reason, error
            if not self._row.stats.queue_time:
                self._seen.queue_time = perf_counter() - self._seen.began  # it never had a row
            if error is None and self._last is None:
                self._events.append(Event(self._whole[self._shown :], (), (), reason))
                self._shown = len(self._whole)
            self._wake()

    # --- waiting ---

    def _wake(self) -> None:
        self._changed.notify_all()
        self._waiters.wake()

    def _begin(self) -> None:
        with self._changed:
            if self._is_read:
                raise SessionError(
                    "the events of this request are being read, or were; they come once: read `completion`"
                )
            self._is_read = True

    def _wait(self) -> Event | None:
        """The next event, once there is one; None behind the last."""
        self._check_process()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._events or self._reason is not None, self._left()):
                    break
            self._expire()
        return self._take()

    async def _soon(self, is_enough: Callable[[], bool]) -> None:
        """Wait for the end, or until `is_enough`."""
        self._check_process()
        while True:
            with self._changed:
                if self._reason is not None or is_enough():
                    return
                changed = self._waiters.join()
            await asyncio.wait({changed}, timeout=self._left())
            self._expire()

    def _take(self) -> Event | None:
        with self._changed:
            if self._events:
                return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        return self.completion

    def _left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    def _expire(self) -> None:
        """A reader sees the deadline itself: the batcher's thread may hang in a step."""
        if self.is_overdue:
            self._end(self, "deadline")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SessionError("this request belongs to the process that this one was forked from")


def sooner(a: float | None, b: float | None) -> float | None:
    """The lesser of two times, of which None never comes."""
    return min((seconds for seconds in (a, b) if seconds is not None), default=None)
