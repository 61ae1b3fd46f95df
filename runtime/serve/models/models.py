"""The served bundles, by the names that clients use: which are open, and which is closed for another."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Mapping
from itertools import count

from ... import machine
from ...errors import MarsError, SessionError
from ...session.session import Session
from ..options import ServeOptions
from ..refusals import Refused
from .model import Lease, Model, Unopened
from .served import Served

LOG = logging.getLogger("mars_export.serve")


class Models:
    """All served bundles. A request without a model gets the first one.

    Sessions are open from the start to the end. An unopened bundle is opened for its first request, and
    closed when another one needs its place and no request uses it: `max_models` and `max_model_bytes` of the
    options, or the machine's memory. `take` and leases belong to one event loop.
    """

    def __init__(self, sources: Mapping[str, Session | Unopened], options: ServeOptions) -> None:
        if not sources:
            raise SessionError("at least one bundle is needed")
        self._options = options
        self.models = {name: Model(name, source) for name, source in sources.items()}
        for model in self.models.values():
            if not isinstance(model.source, Unopened):
                model.served = Served(model.name, model.source, options)
        self._is_started = self._is_closed = False
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()  # of requests that need another model to be opened
        self._needs_room = False
        self._released = asyncio.Event()
        self._uses = count(1)

    @property
    def served(self) -> dict[str, Served]:
        """The open bundles."""
        return {name: model.served for name, model in self.models.items() if model.served is not None}

    def start(self) -> None:
        """Begin to warm up the sessions, one after the other. Later calls do nothing."""
        with self._lock:
            if self._is_started:
                return
            self._is_started = True
        threading.Thread(target=self._warm, name="mars-warm", daemon=True).start()

    def warm(self) -> None:
        """Warm up now. Raises the first failure."""
        with self._lock:
            self._is_started = True
        self._warm()
        for fault in self.faults.values():
            raise fault

    def _warm(self) -> None:
        for served in self.served.values():
            served.warm()

    def find(self, name: str | None) -> tuple[Model, str | None]:
        """The model of a name, and the profile after its colon. Raises Refused."""
        if name is None:
            return next(iter(self.models.values())), None
        if name in self.models:
            return self.models[name], None
        for at in (i for i, character in enumerate(name) if character == ":"):
            model = self.models.get(name[:at])
            if model is not None and name[at + 1 :] in model.profiles:
                return model, name[at + 1 :]
        known = ", ".join(other for model in self.models.values() for other in model.names)
        raise Refused(
            404, f"no model {name[:200]!r} (there are: {known})", param="model", code="model_not_found"
        )

    # --- opening and closing ---

    async def take(self, name: str | None) -> Lease:
        """Open the model of a name if it is not, and keep it open. Raises Refused."""
        model, profile = self.find(name)
        if model.served is None or self._needs_room:  # then all wait, or a busy model would keep its place
            async with self._turn:
                if model.served is None:
                    await self._open(model)
                return self._lease(model, profile)
        return self._lease(model, profile)

    def _lease(self, model: Model, profile: str | None) -> Lease:
        assert model.served is not None, "it is open"
        model.used = next(self._uses)
        return Lease(model, model.served, profile, self._released.set)

    async def _open(self, model: Model) -> None:
        if self._is_closed:
            raise Refused(503, f"{model.name} takes no more requests", code="closing")
        while self._is_over(model):
            if not await self._close_one():
                self._needs_room = True
                try:
                    self._released.clear()
                    await self._released.wait()
                finally:
                    self._needs_room = False
        model.is_opening = True
        opening = asyncio.ensure_future(self._opened(model))
        try:
            await asyncio.shield(opening)
        finally:
            while not opening.done():  # the client has gone; the next turn begins when this one is over
                await asyncio.wait({opening})
            model.is_opening = False

    async def _opened(self, model: Model) -> None:
        while True:
            try:
                model.served = await asyncio.to_thread(self._new_served, model)
                model.fault = None
                return
            except MarsError as error:
                if error.code == "out_of_memory" and await self._close_one():
                    continue
                model.fault = error
                LOG.error("%s cannot be opened: %s", model.name, error)
                raise Refused(
                    503, f"{model.name} cannot be opened; see the server's log", code="failed"
                ) from None

    def _new_served(self, model: Model) -> Served:
        assert isinstance(model.source, Unopened), "a session is open from the start"
        served = Served(model.name, model.source.open(), self._options)
        served.warm()
        if served.fault is not None:
            raise SessionError(f"its first step failed ({type(served.fault).__name__})")
        return served

    def _is_over(self, model: Model) -> bool:
        """Whether `model` does not fit beside the open ones."""
        options = self._options
        is_open = [other for other in self.models.values() if other.served is not None]
        if options.max_models is not None and len(is_open) >= options.max_models:
            return True
        num_bytes = sum(other.num_bytes for other in (*is_open, model))
        return bool(is_open) and options.max_model_bytes is not None and num_bytes > options.max_model_bytes

    async def _close_one(self) -> bool:
        """Close the model that was not used for the longest time. False if all are in use."""
        idle = [model for model in self.models.values() if model.can_close]
        if not idle:
            return False
        model = min(idle, key=lambda model: model.used)
        served, model.served = model.served, None
        assert served is not None, "it is open"
        LOG.info("closing %s", model.name)
        await asyncio.to_thread(served.close, 0)
        del served
        await asyncio.to_thread(_free)
        return True

    # --- health ---

    @property
    def is_ready(self) -> bool:
        return not self._is_closed and all(served.is_ready for served in self.served.values())

    @property
    def is_live(self) -> bool:
        """False if only a new process helps: a bundle cannot be served any more, or a step hangs."""
        return not self.faults and not any(served.hangs for served in self.served.values())

    @property
    def faults(self) -> dict[str, BaseException]:
        """The names of open bundles that cannot be served, with the reasons."""
        faults = {name: served.fault or served.broken for name, served in self.served.items()}
        return {name: fault for name, fault in faults.items() if fault is not None}

    def close(self, drain: float) -> None:
        """Refuse new requests, and end after running ones, in at most `drain` seconds."""
        self._is_closed = True
        threads = [threading.Thread(target=served.close, args=(drain,)) for served in self.served.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _free() -> None:
    """Free a closed session, which refers to itself, and return its memory to the system."""
    gc.collect()
    machine.trim()
