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
from collections.abc import Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any

from ..decode.config import GenerationConfig
from ..decode.row import Accepted, FinishReason, Row
from ..decode.schedule import Limits, Schedule
from ..errors import DeviceLost, Overloaded, SessionError
from ..session.session import Session
from ..text.prompts import Prompt
from .places import Counts, Places
from .request import Request, Waiters, moment_after, sooner
from .turn import in_turn

# Logs numbers, reasons and times; never a prompt, an answer or an error message.
LOG = logging.getLogger("mars_export")
LOG.addHandler(logging.NullHandler())

ENDS = {"cancelled": "cancelled", "deadline": "expired"}  # counts of requests that did not finish, by reason
STEP_TIMEOUT = 10.0  # seconds that `close` waits for a step, which otherwise counts as hanging


class Batcher:
    """Continuous batching over one session: requests join and leave at any step, each with its own settings.

    Thread-safe, for any number of threads and event loops of the process that created it. As a context
    manager it closes at the end, which cancels all requests; call `close(drain=True)` to finish them first.
    An error in one request ends that request; an error in the batcher itself ends all, and `submit` raises
    from then on.
    """

    def __init__(self, session: Session, limits: Limits | None = None) -> None:
        manifest = session.bundle.manifest
        self.session, self.limits = session, limits or Limits()
        # Measured now, so that no running row waits for it, and before the batcher takes its KV memory.
        _ = session.cost
        budget = session.kv_budget(self.limits.max_rows, self.limits.kv_bytes)
        self._schedule = Schedule(
            session.backend, manifest.block, manifest.mask_id, self.limits, session.policy(), budget
        )
        self._budget, self._process = budget, os.getpid()
        self._changed = threading.Condition()  # guards the fields below; never held while a step runs
        self._requests: dict[int, tuple[Request, Row]] = {}
        self._places = Places(self.limits)
        self._arrivals: deque[Row] = deque()  # rows that the thread will add to the schedule
        self._numbers = itertools.count()
        self._waiters = Waiters()  # for room
        self._step_began: float | None = None
        self._closed = self._stopped = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mars-batcher", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SessionError(
                f"the batcher's thread cannot be started ({error}); free memory, or allow more threads"
            ) from error
        _RUNNING.add(self)
        LOG.info("batcher started: %r, %r, %s", manifest.source, session.variant.name, self.limits)

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
        self._check_process()
        until, wait = moment_after(deadline), sooner(wait, deadline)
        with self._changed:
            self._changed.wait_for(lambda: not isinstance(self._refusal(client), Overloaded), wait)
            self._enter(client)
        try:
            request, row = self._new_request(prompt, config, until, client)
        except BaseException as error:
            self._leave(client, error)
            raise
        return self._start(request, row)

    async def asubmit(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        wait: float | None = 0,
        deadline: float | None = None,
        client: Hashable = None,
        turn: AbstractAsyncContextManager[None] | None = None,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Request:
        """`submit` for coroutines. `turn` is held while the prompt and a grammar are processed. `tools`:
        functions as JSON text that messages list and the answer may call. `template`: its variables.
        """
        self._check_process()
        until, wait = moment_after(deadline), sooner(wait, deadline)
        last = None if wait is None else monotonic() + wait
        while True:
            with self._changed:
                seconds = None if last is None else last - monotonic()
                is_late = seconds is not None and seconds <= 0
                if is_late or not isinstance(self._refusal(client), Overloaded):
                    self._enter(client)
                    break
                room = self._waiters.join()
            await asyncio.wait({room}, timeout=seconds)
        try:
            new_request = partial(self._new_request, prompt, config, until, client, tools, template)
            request, row = await in_turn(turn, new_request)
        except BaseException as error:
            self._leave(client, error)
            raise
        return self._start(request, row)

    @property
    def alive(self) -> bool:
        """Whether it accepts requests: not closed, not failed, and in its own process."""
        return not self._closed and os.getpid() == self._process and self._thread.is_alive()

    @property
    def fault(self) -> BaseException | None:
        """The error that ended it, if one did: a bug, or a device that failed."""
        return self._fault

    @property
    def counts(self) -> Counts:
        """Counts of requests so far."""
        return self._places.counts

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return self._schedule.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, including those that are being tokenized."""
        return self._places.num_entering + len(self._arrivals) + len(self._schedule.waiting)

    @property
    def kv_usage(self) -> float:
        """The part of the KV memory that running rows fill: of `Limits.kv_bytes`, or of `max_rows` rows."""
        num_entries = sum(row.cursor for row in self._schedule.running)
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
        if os.getpid() != self._process:
            return True
        is_in_thread = threading.current_thread() is self._thread
        with self._changed:
            self._closed = True
            self._notify()
            if drain > 0 and not is_in_thread:
                longest = None if drain is True else min(drain, 1e9)
                self._changed.wait_for(lambda: not self._requests or self._stopped, longest)
            remaining = list(self._requests.values())
            for request, row in remaining:
                self._conclude(request, row, "cancelled")
            self._stopped = True
            self._notify()
        if remaining:
            LOG.warning("batcher closing: %d requests cancelled", len(remaining))
        if not is_in_thread:
            self._thread.join(timeout)
        if not is_in_thread and self._thread.is_alive():
            LOG.error("batcher closed, but a step has been hanging for %.1f s", self.step_seconds)
            return False
        return True

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the way in ---

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            # Without a lock: the thread that holds it may not exist in this process.
            raise SessionError(
                "this batcher belongs to the process that this one was forked from; open a session and create"
                " a batcher after the fork"
            )

    def _refusal(self, client: Hashable) -> SessionError | None:
        """Why no request is accepted now. The caller holds the lock."""
        if self._fault is not None:
            return SessionError(f"this batcher failed ({type(self._fault).__name__}); make a new one")
        if self._closed:
            return SessionError("this batcher is closed; make a new one")
        return self._places.refusal(client, self._schedule.num_rows, self.num_waiting)

    @property
    def _room(self) -> int:
        """Rows less waiting requests; a step may increase it."""
        return self._schedule.num_rows - len(self._schedule.waiting)

    def _enter(self, client: Hashable) -> None:
        """Take a place, or raise why there is none. The caller holds the lock."""
        refusal = self._refusal(client)
        if refusal is not None:
            is_full = isinstance(refusal, Overloaded)
            self._places.count(overloaded=int(is_full), refused=int(not is_full))
            LOG.info("request refused: %s", refusal)
            raise refusal
        self._places.enter(client)

    def _leave(self, client: Hashable, error: BaseException) -> None:
        """Return the place of a request that ended before it was accepted."""
        is_refused = not isinstance(error, asyncio.CancelledError)
        with self._changed:
            self._places.leave(client, refused=is_refused)
            self._notify()
        if is_refused:
            LOG.info("request of %r refused: its prompt or its settings", client)
        else:
            LOG.info("request of %r cancelled before it was accepted", client)

    def _new_request(
        self,
        prompt: Prompt,
        config: GenerationConfig | None,
        until: float | None,
        client: Hashable,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> tuple[Request, Row]:
        """Tokenize the prompt and compile a grammar, without the lock."""
        config = config if config is not None else GenerationConfig()
        self.session.check(config)
        self.limits.check(config)
        number, most = next(self._numbers), self.limits.max_prompt_tokens
        row, text = self.session.new_row(number, prompt, config, most, tools=tools, template=template)
        self._budget.check(row)
        row.client = client
        request = Request(row, text, self._end, until, client)
        row.on_start = request.start
        return request, row

    def _start(self, request: Request, row: Row) -> Request:
        with self._changed:
            if self._closed:
                self._places.leave(request.client)
                raise SessionError("this batcher was closed meanwhile; make a new one")
            self._arrivals.append(row)
            self._requests[row.index] = request, row
            self._places.accept()
            self._notify()
        LOG.debug("request %d of %r: %d prompt tokens", row.index, request.client, row.stats.prompt_tokens)
        return request

    # --- the way out ---

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request for its reader."""
        if os.getpid() != self._process:
            return
        with self._changed:
            if (entry := self._requests.get(request.number)) is not None:
                self._conclude(*entry, reason)

    def _conclude(
        self, request: Request, row: Row, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End a request, for `reason` unless a delivered step gave another. Its row leaves before the next
        step. The caller holds the lock.
        """
        if self._requests.pop(request.number, None) is None:
            return
        row.finish_reason = row.finish_reason or reason
        reason = request.last_reason or reason
        outcome = ENDS.get(reason, "finished") if error is None else "failed"
        self._places.end(request.client, outcome, request.completion)
        request.conclude(reason, error)  # after counting, so that readers of the answer find it counted
        cause = reason if error is None else type(error).__name__
        LOG.log(logging.WARNING if error else logging.INFO, request.summary(row.config, outcome, cause))
        self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        self._waiters.wake()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._next():
                self._step()
            self._schedule.step()  # all rows have ended: frees the KV memory
        except BaseException as error:  # a bug, or a library's panic: no reader may wait forever
            LOG.critical("batcher failed: %s", type(error).__name__)
            with self._changed:
                self._fault, self._closed, self._stopped = error, True, True
                for request, row in list(self._requests.values()):
                    self._conclude(request, row, "cancelled", error)
                self._notify()

    def _next(self) -> bool:
        """Wait for work; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._arrivals or not self._schedule.is_idle)
            while self._arrivals:
                self._schedule.add(self._arrivals.popleft())
            for request, row in list(self._requests.values()):
                if request.is_overdue:
                    self._conclude(request, row, "deadline")
            return not self._stopped

    def _step(self) -> None:
        room, lost = self._room, None
        self._step_began = perf_counter()
        for events in self._schedule.forwards():
            for event in events:  # at once: the first tokens of a prompt do not wait for the others' forward
                self._deliver(event)
                lost = event.error if isinstance(event.error, DeviceLost) else lost
        self._step_began = None
        if self._room > room:
            with self._changed:
                self._notify()
        if lost is not None:
            LOG.critical("%s", lost)
            raise lost

    def _deliver(self, event: Accepted) -> None:
        entry, error = self._requests.get(event.row), event.error
        if entry is None:
            return  # it ended while the forward ran
        request, row = entry
        if error is None:
            try:
                request.deliver(event)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as panic:  # of the tokenizer; it concerns only this answer
                error = panic
        if error is not None or event.finish_reason is not None:
            with self._changed:
                self._conclude(request, row, event.finish_reason or "cancelled", error)


_RUNNING: weakref.WeakSet[Batcher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close before the interpreter ends: a thread that is inside a library then could crash the process."""
    for batcher in list(_RUNNING):
        batcher.close()
