"""One request to a batcher, for its readers: events, the answer so far, how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import suppress
from time import monotonic, perf_counter

from ..decode.sequence import Accepted, FinishReason, Sequence
from ..decode.stats import Stats
from ..errors import SessionError
from ..rules import is_number
from ..session.answer import Answer, Completion, Event
from ..text.tokenizer import TextStream

End = Callable[["Request", FinishReason], None]
"""(request, reason): the batcher's function that ends a request"""


class Waiters:
    """Coroutines that wait for a change. The owner's lock guards it."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def join(self) -> asyncio.Future[None]:
        """A future of the running loop for the next change."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        """Complete all futures, from any thread."""
        futures, self._futures = self._futures, []
        for future in futures:
            with suppress(RuntimeError):  # the loop is closed
                future.get_loop().call_soon_threadsafe(_complete, future)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Request(Answer):
    """One submitted prompt. Iterate over its events once, with `for` or `async for`; leaving early cancels
    it. The last event has the finish_reason; an error is raised instead. `tau` and `exact` may be changed
    while it runs.

    number: counts a batcher's requests
    client: the one of `submit`
    finish_reason: None while the request runs or waits
    error: the request's error, if it failed
    has_row: whether it no longer waits for its sequence
    last_reason: the finish_reason of a delivered step, if one ended the request
    """

    def __init__(
        self,
        seq: Sequence,
        text: TextStream | None,
        end: End,
        deadline: float | None = None,
        client: Hashable = None,
    ) -> None:
        super().__init__(seq, text)
        self.seq, self.number, self.client = seq, seq.index, client
        self.finish_reason: FinishReason | None = None
        self.last_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.has_row = False
        self._end, self._deadline = end, deadline  # a time of the monotonic clock
        self._changed = threading.Condition()  # guards the fields; never held while a step runs
        self._waiters = Waiters()
        self._events: deque[Event] = deque()
        self._token_ids: list[int] = []
        self._answer_text, self._num_sent = "", 0  # and how many of its characters events have
        self._stats = seq.stats.copy()
        self._is_read = False

    # --- for readers, in any thread ---

    def __iter__(self) -> Iterator[Event]:
        self._begin()
        try:
            while self._wait(lambda: bool(self._events)) and (event := self._take()) is not None:
                yield event
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        self._begin()
        try:
            while True:
                await self._await(lambda: bool(self._events))
                if (event := self._take()) is None:
                    return
                yield event
        finally:
            self.cancel()

    async def begun(self) -> None:
        """Wait until the request has its sequence, or has ended."""
        await self._await(lambda: self.has_row)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer. Raises the request's error, or after `timeout` seconds SessionError; the
        request then goes on.
        """
        if not self._wait(lambda: False, timeout):
            raise SessionError(
                f"the answer is not finished after {timeout:g} seconds; it goes on, ask again or cancel it"
            )
        return self._outcome()

    async def aresult(self) -> Completion:
        """`result` for coroutines; `asyncio.wait_for` limits the wait, and the request then goes on."""
        await self._await(lambda: False)
        return self._outcome()

    def cancel(self) -> None:
        """End the request; its sequence is free before the next step. An ended request stays as it is."""
        self._end(self, "cancelled")

    @property
    def completion(self) -> Completion:
        """The answer of all events so far; `finish_reason` is "cancelled" before the end. Never waits."""
        with self._changed:
            reason = self.finish_reason or "cancelled"
            ids, confidences = tuple(self._token_ids), tuple(self._confidences)
            tops = tuple(self.seq.top_logprobs[: len(ids)])
            return Completion(self._answer_text, ids, confidences, reason, self._stats, tops)

    @property
    def stats(self) -> Stats:
        """Counts of the events so far."""
        return self._stats

    @property
    def prompt(self) -> list[int]:
        """Its token ids."""
        return self.seq.tokens[: self.seq.stats.prompt_tokens]

    # --- for the batcher ---

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and monotonic() >= self._deadline

    def start(self) -> None:
        """The request has its sequence. Called in the batcher's thread, before each step."""
        if not self.has_row:
            with self._changed:
                self.has_row, self._stats = True, self.seq.stats.copy()
                self._wake()

    def deliver(self, accepted: Accepted) -> None:
        """Add the event of a step. Called in the batcher's thread only, because the text grows here."""
        event = Event.of(accepted, self._grown(accepted.finish_reason))
        text = self._text.text if self._text is not None else ""
        with self._changed:
            if self.finish_reason is not None:
                return  # it ended while the step ran
            self._token_ids += accepted.token_ids
            self._confidences += accepted.confidences
            self._answer_text, self._stats = text, self.seq.stats.copy()
            # the sequence may have tokens of a later event of this step
            self._stats.tokens = len(self._token_ids)
            self._num_sent += len(event.text)
            self._events.append(event)
            self.last_reason = accepted.finish_reason
            self._wake()

    def conclude(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the request and notify its readers. Called once, in any thread."""
        with self._changed:
            self.finish_reason, self.error = reason, error
            if not self.has_row:
                self._stats.queue_time = perf_counter() - self._stats.began
            if error is None and self.last_reason is None:
                self._events.append(Event(self._answer_text[self._num_sent :], (), (), reason))
                self._num_sent = len(self._answer_text)
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

    def _wait(self, is_enough: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for the end, or until `is_enough`. False after `timeout` seconds."""
        last = None if timeout is None else monotonic() + timeout
        while True:
            left = None if last is None else last - monotonic()
            with self._changed:
                seconds = earlier(self._seconds_left(), left)
                if self._changed.wait_for(lambda: self.finish_reason is not None or is_enough(), seconds):
                    return True
            self._expire()
            if last is not None and monotonic() >= last and self.finish_reason is None:
                return False

    async def _await(self, is_enough: Callable[[], bool]) -> None:
        """`_wait` for coroutines, without a timeout."""
        while True:
            with self._changed:
                if self.finish_reason is not None or is_enough():
                    return
                change = self._waiters.join()
            await asyncio.wait({change}, timeout=self._seconds_left())
            self._expire()

    def _take(self) -> Event | None:
        """The next event; None after the last."""
        with self._changed:
            if self._events:
                return self._events.popleft()
        if self.error is not None:
            raise self.error
        return None

    def _outcome(self) -> Completion:
        if self.error is not None:
            raise self.error
        return self.completion

    def _seconds_left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    def _expire(self) -> None:
        """End an overdue request in the reader's thread, because the batcher's may hang in a step."""
        if self.is_overdue:
            self._end(self, "deadline")


def deadline_at(deadline: float | None) -> float | None:
    """The time `deadline` seconds from now, on the monotonic clock; None for no deadline."""
    if deadline is None:
        return None
    if not is_number(deadline) or deadline <= 0:
        raise SessionError(f"deadline must be a number of seconds above 0, not {deadline!r}")
    return monotonic() + min(deadline, 1e9)


def earlier(a: float | None, b: float | None) -> float | None:
    """The earlier of two times; None is never."""
    return min((seconds for seconds in (a, b) if seconds is not None), default=None)
