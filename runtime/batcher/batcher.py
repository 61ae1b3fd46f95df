"""A batching service over one session: submit from any thread or coroutine, stream, cancel. A thread of its
own runs the steps.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

from ..decode.config import GenerationConfig
from ..decode.event import Event, FinishReason
from ..decode.limits import Limits
from ..decode.sequence import Sequence
from ..errors import DeviceLost, Overloaded, SessionError
from ..session.session import Session
from ..text.prompts import Prompt
from .admission_queue import AdmissionQueue, Counts
from .request import Request, deadline_at, earlier, settled

# Logs numbers, reasons and times; never a prompt, an answer or an error message.
LOG = logging.getLogger("mars_export")
LOG.addHandler(logging.NullHandler())

ENDS = {"cancelled": "cancelled", "deadline": "expired"}  # counts of requests that did not finish, by reason
STEP_TIMEOUT = 10.0  # seconds that `close` waits for a step, which otherwise counts as hanging


class Batcher:
    """Continuous batching over one session: requests join and leave at any step, each with its own settings.

    Thread-safe, for any number of threads and event loops of the process that created it. As a context
    manager it closes at the end, which cancels all requests; call `close(drain=True)` to finish them first.
    An error in one request ends that request. An error in the batcher itself, or a failed device, ends all:
    `fault` is that error, and `submit` raises from then on.
    """

    def __init__(self, session: Session, limits: Limits | None = None) -> None:
        self.session, self.limits = session, limits or Limits()
        self._budget = budget = session.kv_budget(self.limits.max_rows, self.limits.kv_bytes)
        self._schedule = session.schedule(replace(self.limits, max_rows=budget.max_rows), budget)
        self._changed = threading.Condition()  # guards the fields below; never held while a step runs
        self._requests: dict[int, Request] = {}  # in the order in which they came
        self._admission = AdmissionQueue(self.limits)
        self._arrivals: deque[Sequence] = deque()  # sequences that the thread will add to the schedule
        self._numbers = itertools.count()
        self._next_change: Future[None] = Future()  # completed at the next change, for coroutines
        self._step_began: float | None = None
        self._closed = self._stopped = False
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mars-batcher", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SessionError(
                f"the batcher's thread cannot be started ({error}); free memory, or allow more threads"
            ) from error
        _RUNNING.add(self)
        source = session.bundle.manifest.source
        LOG.info("batcher started: %r, %r, %s", source, session.variant.name, self.limits)

    # --- requests ---

    def submit(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        wait: float | None = 0,
        deadline: float | None = None,
        client: Hashable = None,
    ) -> Request:
        """Queue a prompt. Returns when it is tokenized, which takes a while for a long one; coroutines use
        `asubmit`.

        wait: seconds to wait for room; None waits until the deadline.
        deadline: seconds from now, after which the request ends with the answer so far and finish_reason
            "deadline", whether it waits or runs.
        client: the client whose turn and share of places the request takes (`Limits`). Requests without a
            client take turns as one client, and their share is not limited.

        Raises Overloaded if there is no room, SessionError for an invalid prompt or config, for a batcher
        that is closed or has failed, and in a forked process.
        """
        config, ends_at, wait = self._checked(config), deadline_at(deadline), earlier(wait, deadline)
        with self._changed:
            self._changed.wait_for(lambda: not isinstance(self._refusal(client), Overloaded), wait)
            self._take_place(client)
        with self._returning_place(client):
            return self._hand_over(self._new_request(prompt, config, ends_at, client))

    async def asubmit(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        wait: float | None = 0,
        deadline: float | None = None,
        client: Hashable = None,
        executor: Executor | None = None,
        arrived_at: float | None = None,
    ) -> Request:
        """`submit` for coroutines. `executor` processes the prompt and a grammar, else the event loop's own.
        `arrived_at`: when its Stats and `deadline` begin, by perf_counter; by default now.
        """
        config, wait = self._checked(config), earlier(wait, deadline)
        ends_at = deadline_at(deadline, arrived_at)
        last = None if wait is None else perf_counter() + wait
        while True:
            with self._changed:
                seconds = None if last is None else last - perf_counter()
                is_late = seconds is not None and seconds <= 0
                if is_late or not isinstance(self._refusal(client), Overloaded):
                    self._take_place(client)
                    break
                change = self._next_change
            await settled(change, seconds)
        new_request = partial(self._new_request, prompt, config, ends_at, client)
        with self._returning_place(client):
            request = await asyncio.get_running_loop().run_in_executor(executor, new_request)
            if arrived_at is not None:
                request.seq.stats.began = request.stats.began = arrived_at
            return self._hand_over(request)

    @property
    def alive(self) -> bool:
        """Whether it accepts requests: not closed, not failed, and in its own process."""
        return not self._closed and self._thread.is_alive()

    @property
    def counts(self) -> Counts:
        """Counts of requests so far. A reader of the last event finds its request counted."""
        with self._changed:
            return self._admission.counts

    @property
    def num_running(self) -> int:
        """Requests with a sequence."""
        return self._schedule.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a sequence, or are being tokenized."""
        return self._admission.num_admitting + len(self._arrivals) + self._schedule.num_waiting

    @property
    def kv_usage(self) -> float:
        """The part of the KV memory that running sequences fill: of `Limits.kv_bytes`, or of `max_rows`
        sequences.
        """
        num_entries = sum(seq.cursor for seq in self._schedule.running)
        return min(1.0, num_entries / max(1, self._budget.num_entries))

    @property
    def step_seconds(self) -> float:
        """How long the current step has been running, 0 between steps. It shows a step that hangs."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    def close(self, drain: bool | float = 0, timeout: float | None = STEP_TIMEOUT) -> bool:
        """Accept no more requests, let the present ones run for `drain` seconds (True: until they finish),
        then cancel the rest and end the thread.

        Cancelled requests keep their answers so far, with finish_reason "cancelled". Waits for the current
        step, at most `timeout` seconds (None: until it ends). Returns False if it still hangs.
        """
        if not isinstance(drain, int | float) or not 0 <= drain < math.inf:
            raise SessionError(f"drain must be True or a number of seconds of 0 or more, not {drain!r}")
        with self._changed:
            self._closed = True
            self._notify()
            if drain > 0:
                longest = None if drain is True else min(drain, 1e9)
                self._changed.wait_for(lambda: not self._requests or self._stopped, longest)
            remaining = list(self._requests.values())
            for request in remaining:
                self._conclude(request, "cancelled")
            self._stopped = True
            self._notify()
        if remaining:
            LOG.warning("batcher closing: %d requests cancelled", len(remaining))
        self._thread.join(timeout)
        if self._thread.is_alive():
            LOG.error("batcher closed, but a step has been hanging for %.1f s", self.step_seconds)
            return False
        return True

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the way in ---

    def _checked(self, config: GenerationConfig | None) -> GenerationConfig:
        """The settings of a request. Raises SessionError unless the bundle and the limits allow them."""
        config = config if config is not None else GenerationConfig()
        try:
            self.session.check(config)
            self.limits.check(config)
        except SessionError:
            with self._changed:
                self._admission.count(refused=1)
            raise
        return config

    def _refusal(self, client: Hashable) -> SessionError | None:
        """Why no request is accepted now. The caller holds the lock."""
        if self.fault is not None:
            return SessionError(f"this batcher failed ({type(self.fault).__name__}); make a new one")
        if not self.alive:
            return SessionError("this batcher is closed, or its process was forked; make a new one")
        return self._admission.refusal(client, self._schedule.num_rows, self.num_waiting)

    def _take_place(self, client: Hashable) -> None:
        """Take a place, or raise why there is none. The caller holds the lock."""
        refusal = self._refusal(client)
        if refusal is not None:
            is_full = isinstance(refusal, Overloaded)
            self._admission.count(overloaded=int(is_full), refused=int(not is_full))
            LOG.info("request refused: %s", refusal)
            raise refusal
        self._admission.admit(client)

    @contextmanager
    def _returning_place(self, client: Hashable) -> Iterator[None]:
        """Return the place of a request that ends before it is accepted."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._admission.release(client, refused=not isinstance(error, asyncio.CancelledError))
                self._notify()
            LOG.info("request of %r not accepted: %s", client, type(error).__name__)
            raise

    def _new_request(
        self, prompt: Prompt, config: GenerationConfig, ends_at: float | None, client: Hashable
    ) -> Request:
        """Tokenize the prompt, and compile a grammar. Without the lock."""
        number, max_tokens = next(self._numbers), self.limits.max_prompt_tokens
        seq = self.session.new_sequence(number, prompt, config, max_tokens)
        self._budget.check(seq)
        request = Request(seq, self._end, ends_at)
        seq.client, seq.on_forward = client, request.note_step
        return request

    def _hand_over(self, request: Request) -> Request:
        """Give a request to the thread."""
        with self._changed:
            if self._closed:
                raise SessionError("this batcher was closed meanwhile; make a new one")
            self._arrivals.append(request.seq)
            self._requests[request.seq.index] = request
            self._admission.accept()
            self._notify()
        seq = request.seq
        LOG.debug("request %d of %r: %d prompt tokens", seq.index, seq.client, seq.stats.prompt_tokens)
        return request

    # --- the way out ---

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request for its reader."""
        with self._changed:
            self._conclude(request, reason)

    def _conclude(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a request, for `reason` unless a delivered step gave another. Its sequence leaves before the
        next step. An ended request stays as it is. The caller holds the lock.
        """
        seq = request.seq
        if self._requests.pop(seq.index, None) is None:
            return
        seq.end(reason)
        reason = request.conclude(reason, error)
        outcome = ENDS.get(reason, "finished") if error is None else "failed"
        self._admission.end(seq.client, outcome, request.stats)
        cause = reason if error is None else type(error).__name__
        stats, config = request.stats, seq.next_config
        tau = "exact" if config.exact else config.tau
        LOG.log(
            logging.WARNING if error else logging.INFO,
            "request %d of %r %s: %s, %d tokens after %d prompt tokens, tau %s, waited %.3f s, %.3f s in all",
            *(seq.index, seq.client, outcome, cause, stats.tokens, stats.prompt_tokens, tau),
            *(stats.queue_time, perf_counter() - stats.began),
        )
        self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        change, self._next_change = self._next_change, Future()
        change.set_result(None)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._next():
                self._step()
            list(self._schedule.step())  # all sequences have ended: frees the KV memory
        except BaseException as error:  # a bug, or a library's panic: no reader may wait forever
            LOG.critical("batcher failed: %s", type(error).__name__)
            with self._changed:
                self.fault, self._closed, self._stopped = error, True, True
                for request in list(self._requests.values()):
                    self._conclude(request, "cancelled", error)
                self._notify()

    def _next(self) -> bool:
        """Wait for work; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._arrivals or not self._schedule.is_idle)
            while self._arrivals:
                self._schedule.add(self._arrivals.popleft())
            for request in list(self._requests.values()):
                if request.is_overdue:
                    self._conclude(request, "deadline")
            return not self._stopped

    def _step(self) -> None:
        schedule, lost = self._schedule, None
        room = schedule.num_rows - schedule.num_waiting
        self._step_began = perf_counter()
        try:
            for outcomes in schedule.step():
                # At once: the first tokens of a prompt do not wait for the others' forward.
                for event in outcomes:
                    self._deliver(event)
                    lost = event.error if isinstance(event.error, DeviceLost) else lost
        finally:
            self._step_began = None
        if schedule.num_rows - schedule.num_waiting > room:
            with self._changed:
                self._notify()
        if lost is not None:
            LOG.critical("%s", lost)
            raise lost

    def _deliver(self, event: Event) -> None:
        request = self._requests.get(event.seq)
        if request is None:
            return  # it ended while the forward ran
        if event.error is None:
            request.deliver(event)
        if event.finish_reason is not None:
            with self._changed:
                self._conclude(request, event.finish_reason, event.error)


_RUNNING: weakref.WeakSet[Batcher] = weakref.WeakSet()


def _forget_running() -> None:
    """In a forked child no thread runs the steps, and what held a lock never releases it."""
    for batcher in _RUNNING:
        batcher._changed, batcher._requests = threading.Condition(), {}
    _RUNNING.clear()


os.register_at_fork(after_in_child=_forget_running)


@atexit.register
def _close_all() -> None:
    """Close before the interpreter ends: a thread that is inside a library then could crash the process."""
    for batcher in list(_RUNNING):
        batcher.close()
