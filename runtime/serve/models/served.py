"""One open bundle: its session, and its batcher once it is warm."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import replace
from time import perf_counter

from ...batcher.batcher import Batcher
from ...batcher.request import Request
from ...decode.config import GenerationConfig
from ...decode.schedule import Limits
from ...session.session import Session
from ..options import ServeOptions
from ..refusals import Refused, busy
from .adaptive import Adaptive, read_levels


class FairSemaphore:
    """At most `most` holders at a time. For one event loop only."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # in the order of turns

    @asynccontextmanager
    async def of(self, client: Hashable) -> AsyncIterator[None]:
        """Hold the semaphore, when it is this client's turn."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # its next turn comes last
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


LOG = logging.getLogger("mars_export.serve")
WARMING = 5.0  # seconds that a client should wait before it tries again
COMPILING = 2  # grammars at a time: each may take a second and 300 MB
STEP_TIME = 60.0  # seconds for an answer of one token
STEP_HANGS = 120.0  # seconds of a step, after which the server is unhealthy


class Served:
    """One session and its name. It has a batcher once it is warm."""

    def __init__(self, name: str, session: Session, options: ServeOptions) -> None:
        self.name, self.session, self._options = name, session, options
        self.batcher: Batcher | None = None
        self.fault: BaseException | None = None
        self.levels = read_levels(session, options.adaptive)
        self.adaptive = (
            Adaptive(options.adaptive, options.high_queue, options.low_queue, options.hold)
            if options.adaptive
            else None
        )
        self.compiling = FairSemaphore(COMPILING)
        self._waiting: dict[int, Request] = {}  # for a row, as of the last look

    def warm(self) -> None:
        """Measure step times and answer one token, so that the first client need not wait."""
        batcher = None
        try:
            batcher = Batcher(self.session, self._limits())
            self._step(batcher)
            self.batcher = batcher
            LOG.info("%s is warm", self.name)
        except BaseException as error:
            if batcher is not None:
                batcher.close()
            self.fault = error
            LOG.critical("%s cannot be served: %s", self.name, type(error).__name__)

    def close(self, drain: float) -> None:
        """Refuse new requests, and end after running ones, in at most `drain` seconds."""
        if self.batcher is not None:
            self.batcher.close(drain)

    def _limits(self) -> Limits:
        limits, engine = self._options.limits, self.session.variant.engine
        if not self._options.fits_rows or engine is None or engine.max_rows >= limits.max_rows:
            return limits
        LOG.info(
            "%s: at most %d requests run at once, the rows of its engine (--max-rows says another number;"
            " `mars-export trt --batch` builds for more)",
            *(self.name, engine.max_rows),
        )
        return replace(limits, max_rows=engine.max_rows)

    def check(self) -> None:
        """Run a step, unless requests run already. Raises SessionError."""
        batcher = self.running()
        if batcher.num_running + batcher.num_waiting == 0:
            self._step(batcher)

    def _step(self, batcher: Batcher) -> None:
        mask = self.session.bundle.manifest.tokens.mask
        batcher.submit([1 if mask == 0 else 0], GenerationConfig(max_new_tokens=1)).result(STEP_TIME)

    @property
    def is_ready(self) -> bool:
        batcher = self.batcher
        return batcher is not None and batcher.alive and not self.hangs

    @property
    def hangs(self) -> bool:
        """Whether a step has been running for too long."""
        return self.batcher is not None and self.batcher.step_seconds >= STEP_HANGS

    @property
    def broken(self) -> BaseException | None:
        """Why it can no longer be served, such as a failed GPU; else None."""
        return self.batcher.fault if self.batcher is not None else None

    def running(self) -> Batcher:
        """The batcher. Raises Refused if it is not running."""
        if self.batcher is None:
            if self.fault is not None:
                raise Refused(503, f"{self.name} cannot be served; see the server's log", code="failed")
            raise busy(f"{self.name} is being loaded; try again in {WARMING:g} s", WARMING, 503)
        if self.batcher.fault is not None:
            raise Refused(503, f"{self.name} cannot be served any more; see the server's log", code="failed")
        if not self.batcher.alive:
            raise Refused(503, f"{self.name} takes no more requests", code="closing")
        return self.batcher

    # --- waiting requests ---

    def entered(self, request: Request) -> None:
        """Note that a request waits for a row."""
        self._waiting[request.number] = request

    def left(self, request: Request) -> None:
        """Note that a request has stopped waiting."""
        if self._waiting.pop(request.number, None) is not None:
            self._tell(request)

    def watch_waits(self) -> float:
        """Seconds that the oldest waiting request has waited. Requests that have a row now stop waiting."""
        longest = 0.0
        for number, request in list(self._waiting.items()):
            if request.stats.queue_time or request.finish_reason is not None:
                del self._waiting[number]
                self._tell(request)
            else:
                longest = max(longest, perf_counter() - request.stats.began)
        return longest

    def choose_level(self) -> int:
        """The level of load for a new request, after a look at those that wait."""
        return self.adaptive.choose(self.watch_waits()) if self.adaptive is not None else 0

    def _tell(self, request: Request) -> None:
        waited = request.stats.queue_time
        if self.adaptive is not None and waited:
            self.adaptive.saw(waited)

    # --- limits ---

    @property
    def context(self) -> int:
        """Most tokens of a prompt with its answer."""
        session = self.session
        return min(session.bundle.manifest.model.context_length, session.backend.max_capacity)

    @property
    def default_tokens(self) -> int:
        """Most tokens of an answer to a request without `max_tokens`."""
        limits, most = self._options.limits, self.context
        if limits.max_new_tokens is not None:
            most = min(most, limits.max_new_tokens)
        if limits.kv_bytes is not None:  # half is for the prompt
            most = min(most, self.session.kv_budget(1, limits.kv_bytes).num_entries // 2)
        return max(1, most)
