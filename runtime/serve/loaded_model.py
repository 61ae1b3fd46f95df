"""A model that is loaded: its session, and its batcher once it is warm."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..batcher.batcher import Batcher
from ..decode.config import GenerationConfig
from ..decode.limits import Limits
from ..session.session import Session
from .api_error import ApiError, overloaded
from .options import ServeOptions

LOG = logging.getLogger("mars_export.serve")
WARMING = 5.0  # seconds that a client should wait before it tries again
COMPILING = 2  # grammars at a time: each may take a second and 300 MB
MIN_TOKENS = 256  # of an answer to a request without `max_tokens`, if the KV memory is small
STEP_TIME = 60.0  # seconds for an answer of one token
STEP_HANGS = 120.0  # seconds of a step, after which the server is unhealthy


class LoadedModel:
    """One session and its name. It has a batcher once it is warm.

    users: requests that keep it open
    compiling: threads for prompts with a grammar to compile
    default_tokens: most tokens of an answer to a request without `max_tokens`
    """

    def __init__(self, name: str, session: Session, options: ServeOptions) -> None:
        self.name, self.session, self._options = name, session, options
        self.users = 0
        self.batcher: Batcher | None = None
        self._fault: BaseException | None = None
        self.compiling = ThreadPoolExecutor(COMPILING, "mars-compile")
        self.default_tokens = self._default_tokens()

    def warm(self) -> None:
        """Answer one token and build what later requests need, so that the first client need not wait."""
        batcher = None
        try:
            batcher = Batcher(self.session, self._limits())
            self._step(batcher)
            self.session.prepare()
            self.batcher = batcher
            LOG.info("%s is warm", self.name)
        except BaseException as error:
            if batcher is not None:
                batcher.close()
            self._fault = error
            LOG.critical("%s cannot be served: %s", self.name, type(error).__name__)

    def close(self, drain: float) -> None:
        """Refuse new requests, and end after running ones, in at most `drain` seconds."""
        if self.batcher is not None:
            self.batcher.close(drain)

    def release(self) -> None:
        """A request needs it no longer."""
        self.users -= 1

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
    def fault(self) -> BaseException | None:
        """Why it cannot be served, such as a failed GPU; else None."""
        return self._fault or (self.batcher.fault if self.batcher is not None else None)

    @property
    def hangs(self) -> bool:
        """Whether a step has been running for too long."""
        return self.batcher is not None and self.batcher.step_seconds >= STEP_HANGS

    @property
    def is_ready(self) -> bool:
        return self.batcher is not None and self.batcher.alive and not self.hangs

    def running(self) -> Batcher:
        """The batcher. Raises ApiError if it is not running."""
        if self.fault is not None:
            raise ApiError(503, f"{self.name} cannot be served; see the server's log", code="failed")
        if self.batcher is None:
            raise overloaded(f"{self.name} is being loaded; try again in {WARMING:g} s", WARMING, 503)
        if not self.batcher.alive:
            raise ApiError(503, f"{self.name} is shutting down", code="closing")
        return self.batcher

    # --- limits ---

    @property
    def context(self) -> int:
        """Most tokens of a prompt with its answer."""
        session = self.session
        return min(session.bundle.manifest.model.context_length, session.backend.max_capacity)

    def _default_tokens(self) -> int:
        limits, num_tokens = self._options.limits, self.context
        if limits.max_new_tokens is not None:
            num_tokens = min(num_tokens, limits.max_new_tokens)
        budget = self.session.kv_budget(limits.max_rows, limits.kv_bytes)
        if budget.short_entries is not None:  # half is for the prompt
            smallest = min(MIN_TOKENS, budget.row_entries // 4)
            num_tokens = min(num_tokens, max(smallest, budget.short_entries // 2))
        return max(1, num_tokens)
