"""One request to a batcher, for its readers: events, the answer so far, how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from ..decode.event import Event, FinishReason
from ..decode.sequence import Sequence
from ..decode.stats import Stats
from ..errors import SessionError
from ..rules import is_number
from ..session.answer import Answer, Completion

End = Callable[["Request", FinishReason], None]
"""(request, reason): the batcher's function that ends a request"""
Item = Event | BaseException | None
"""None when a request starts; then its events, the last one with a finish_reason; an error in its place."""
Items = asyncio.Queue["tuple[Request | None, Item]"]
"""Items of several requests, and without one those of another source."""


class Request(Answer):
    """One submitted prompt. Iterate over its events once, with `for` or `async for`; leaving early cancels
    it. The last event has the finish_reason; an error is raised instead. `tau` and `exact` may be changed
    while it runs.

    finish_reason: None while the request runs or waits
    error: the request's error, if it failed
    has_started: whether its sequence takes part in steps
    last_reason: the finish_reason of a delivered step, if one ended the request
    """

    def __init__(self, seq: Sequence, end: End, deadline: float | None = None) -> None:
        super().__init__(seq)
        self.finish_reason: FinishReason | None = None
        self.last_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.has_started = False
        self._end, self._deadline = end, deadline  # by perf_counter
        self._lock = threading.Lock()  # guards the fields; never held while a step runs
        self._ended: Future[None] = Future()
        self._sink: Callable[[Item], object] | None = None
        self._answer_text = ""  # with the text that events hold back
        self._stats = seq.stats.copy()

    # --- for readers, in any thread ---

    def __iter__(self) -> Iterator[Event]:
        items: SimpleQueue[Item] = SimpleQueue()
        self._listen(items.put)
        try:
            event = None
            while event is None or event.finish_reason is None:
                try:
                    event = _event(items.get(timeout=self._seconds_left()))
                except Empty:  # the batcher's thread may hang in a step
                    self._end(self, "deadline")
                    continue
                if event is not None:
                    yield event
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        items = Items()
        self.attach(items)
        try:
            event = None
            while event is None or event.finish_reason is None:
                event = _event((await items.get())[1])
                if event is not None:
                    yield event
        finally:
            self.cancel()

    def attach(self, items: Items) -> None:
        """Put the request's items into a queue of the running loop, in place of an iteration. Several
        requests may have one queue.
        """
        loop, left = asyncio.get_running_loop(), self._seconds_left()
        # The batcher's thread may hang in a step.
        timer = None if left is None else loop.call_later(left, self._end, self, "deadline")

        def put(item: Item) -> None:
            is_last = isinstance(item, BaseException) or (item is not None and item.finish_reason is not None)
            if timer is not None and is_last:
                timer.cancel()
            items.put_nowait((self, item))

        self._listen(lambda item: post(loop, put, item))

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer. Raises the request's error, or after `timeout` seconds SessionError; the
        request then goes on.
        """
        last = None if timeout is None else perf_counter() + timeout
        while not self._ended.done():
            left = None if last is None else last - perf_counter()
            if left is not None and left <= 0:
                raise SessionError(
                    f"the answer is not finished after {timeout:g} seconds; it goes on,"
                    " ask again or cancel it"
                )
            wait([self._ended], earlier(self._seconds_left(), left))
            if self.is_overdue:  # the batcher's thread may hang in a step
                self._end(self, "deadline")
        return self._outcome()

    async def aresult(self) -> Completion:
        """`result` for coroutines; `asyncio.wait_for` limits the wait, and the request then goes on."""
        await settled(self._ended, self._seconds_left())
        if not self._ended.done():
            self._end(self, "deadline")
        return self._outcome()

    def cancel(self) -> None:
        """End the request; its sequence is free before the next step. An ended request stays as it is."""
        self._end(self, "cancelled")

    @property
    def completion(self) -> Completion:
        """The answer of all events so far; `finish_reason` is "cancelled" before the end. Never waits."""
        with self._lock:
            reason = self.finish_reason or "cancelled"
            return Completion.of(self._events, self._answer_text, reason, self._stats)

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
        return self._deadline is not None and perf_counter() >= self._deadline

    def note_step(self) -> None:
        """The request takes part in a step. Called in the batcher's thread, before each step."""
        if not self.has_started:
            with self._lock:
                self.has_started, self._stats = True, self.seq.stats.copy()
                self._send(None)

    def deliver(self, event: Event) -> None:
        """Add the event of a step. Called in the batcher's thread only, because the text grows there."""
        with self._lock:
            if self.finish_reason is not None:
                return  # it ended while the step ran
            # The sequence may have tokens of a later event of this step.
            num_tokens = self._stats.tokens + len(event.token_ids)
            self._answer_text, self._stats = self.seq.text, self.seq.stats.copy()
            self._stats.tokens, self.last_reason = num_tokens, event.finish_reason
            self._add(event)

    def conclude(self, reason: FinishReason, error: BaseException | None = None) -> FinishReason:
        """End the request, for the reason of a delivered step if one ended it, else for `reason`, and notify
        its readers. Called once, in any thread. Returns the reason.
        """
        with self._lock:
            reason = self.last_reason or reason
            self.finish_reason, self.error = reason, error
            if not self.has_started:
                self._stats.queue_time = perf_counter() - self._stats.began
            if error is not None:
                self._send(error)
            elif self.last_reason is None:
                num_sent = sum(len(event.text) for event in self._events)
                self._add(Event(self._answer_text[num_sent:], (), (), reason))
        self._ended.set_result(None)
        return reason

    # --- parts ---

    def _listen(self, sink: Callable[[Item], object]) -> None:
        """Pass the items to `sink`, those so far at once. It is called in any thread, and returns at once."""
        with self._lock:
            if self._sink is not None:
                raise SessionError("the events of this request already have a reader; use `completion`")
            self._sink = sink
            if self.has_started:
                self._send(None)
            for item in (*self._events, self.error):
                if item is not None:
                    self._send(item)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._send(event)

    def _send(self, item: Item) -> None:
        if self._sink is not None:
            self._sink(item)

    def _outcome(self) -> Completion:
        if self.error is not None:
            raise self.error
        return self.completion

    def _seconds_left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - perf_counter())


def _event(item: Item) -> Event | None:
    """The event of an item. Raises the error of a request."""
    if isinstance(item, BaseException):
        raise item
    return item


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function in an event loop, from any thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *args)


async def settled(future: Future[None], seconds: float | None) -> None:
    """Wait until another thread completes `future`, at most `seconds`."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: post(loop, done.set))
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(done.wait(), seconds)


def deadline_at(deadline: float | None, start: float | None = None) -> float | None:
    """The time `deadline` seconds after `start`, by default now; None for no deadline."""
    if deadline is None:
        return None
    if not is_number(deadline) or deadline <= 0:
        raise SessionError(f"deadline must be a number of seconds above 0, not {deadline!r}")
    return (perf_counter() if start is None else start) + min(deadline, 1e9)


def earlier(a: float | None, b: float | None) -> float | None:
    """The earlier of two times; None is never."""
    return min((seconds for seconds in (a, b) if seconds is not None), default=None)
