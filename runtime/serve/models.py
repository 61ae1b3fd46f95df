"""The served bundles by the names that clients use: loaded on use, and closed to make room for others."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from time import time
from typing import Any, TypeVar

from .. import machine
from ..bundle.manifest import Variant
from ..bundle.open import Bundle, open_bundle
from ..bundle.profiles import staleness
from ..device.variants import choose
from ..errors import MarsError, SessionError
from ..session.session import Session
from .api_error import ApiError
from .loaded_model import LoadedModel
from .options import ServeOptions


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A bundle that is opened when a request names it, and the variant that will run."""

    bundle: Bundle
    variant: Variant
    open: Callable[[], Session]


def read_bundles(paths: Mapping[str, str | Path], **settings: Any) -> dict[str, Session | LazyModel]:
    """Bundles by model name, with the settings of Session.open. A single one is opened at once, several for
    their first requests. Raises BundleError and SessionError.
    """
    if len(paths) == 1:
        return {name: Session.open(path, **settings) for name, path in paths.items()}
    bundles: dict[str, Session | LazyModel] = {}
    device, variant = settings.get("device", "cpu"), settings.get("variant")
    for name, path in paths.items():
        bundle = open_bundle(path, safe=settings.get("safe", False))
        choice = choose(bundle, device) if variant is None else bundle.variant(variant)
        bundles[name] = LazyModel(bundle, choice, partial(Session.open, path, **settings))
    return bundles


class Model:
    """A name and a bundle.

    opened: its session and batcher, while it is open
    used: number of its last use, in the order of all uses
    state: loaded, loading, failed (at the last attempt) or unloaded
    """

    def __init__(self, name: str, source: Session | LazyModel) -> None:
        self.name, self.source = name, source
        self.opened: LoadedModel | None = None
        self.used = 0
        self.state = "unloaded"
        self._created = int(time())
        manifest = source.bundle.manifest
        self.profiles = [p.name for p in manifest.profiles if not staleness(manifest, source.variant, p)]

    @property
    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}:{profile}" for profile in self.profiles)]

    @property
    def num_bytes(self) -> int:
        """The size of the graph and the weights."""
        variant = self.source.variant
        files = self.source.bundle.manifest.files
        return sum(entry.size for entry in files if entry.path in (variant.file, variant.weights))

    @property
    def can_close(self) -> bool:
        """Whether it is open, no request uses it, and it can be opened again."""
        return self.opened is not None and not self.opened.users and isinstance(self.source, LazyModel)

    def entries(self) -> list[dict[str, Any]]:
        """Its entries in /v1/models: its name, and its name with each valid profile."""
        return [self.entry(name) for name in self.names]

    def entry(self, name: str) -> dict[str, Any]:
        manifest, variant, opened = self.source.bundle.manifest, self.source.variant, self.opened
        text, outputs = manifest.text, set(variant.outputs)
        is_structured = text is not None and bool({"logits", "topk_ids"} & outputs)
        mars = {
            "state": self.state,
            "block": manifest.block,
            "precision": variant.precision,
            "batch_invariant": variant.is_batch_invariant,
            "context": opened.context if opened is not None else manifest.model.context_length,
            "profiles": self.profiles,
            "sampling": "logits" in outputs,
            "structured": is_structured,
            "json_schema": is_structured,
            "tools": is_structured and text is not None and text.chat_template is not None,
            "thinking": text is not None and text.thinking is not None,
            "logprobs": True,
            "variant": variant.name,
            "backend": variant.backend,
        }
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "mars-export", "mars": mars,
        }  # fmt: skip


LOG = logging.getLogger("mars_export.serve")
Result = TypeVar("Result")
POLL_SECONDS = 0.02  # seconds between looks for a model that no request uses any more


class Models:
    """All served bundles. A request without a model gets the first one.

    Sessions are open from the start to the end. An unopened bundle is opened for its first request, and
    closed when another one needs its place and no request uses it: `max_models` and `max_model_bytes` of the
    options, or the machine's memory. `take` belongs to one event loop.
    """

    def __init__(self, sources: Mapping[str, Session | LazyModel], options: ServeOptions) -> None:
        if not sources:
            raise SessionError("at least one bundle is needed")
        self._options = options
        self.models = {name: Model(name, source) for name, source in sources.items()}
        for model in self.models.values():
            if not isinstance(model.source, LazyModel):
                model.opened, model.state = LoadedModel(model.name, model.source, options), "loaded"
        self._is_started = self._is_closed = False
        self._lock = threading.Lock()  # guards these two, and that nothing is opened after `close`
        self._turn = asyncio.Lock()  # of requests that need another model to be opened
        self._needs_room = False
        self._uses = count(1)

    @property
    def opened(self) -> dict[str, LoadedModel]:
        """The open models."""
        return {name: model.opened for name, model in self.models.items() if model.opened is not None}

    def start(self) -> None:
        """Begin to warm up the sessions, one after the other. Later calls do nothing."""
        with self._lock:
            if self._is_started:
                return
            self._is_started = True
        threading.Thread(target=self._warm, name="mars-warm", daemon=True).start()

    def warm(self) -> None:
        """Warm up now. Raises the first failure."""
        self._is_started = True
        self._warm()
        for fault in self.faults.values():
            raise fault

    def _warm(self) -> None:
        for model in self.opened.values():
            model.warm()

    def find(self, name: str | None) -> tuple[Model, str | None]:
        """The model of a name, and the profile after its colon. Raises ApiError."""
        if name is None:
            return next(iter(self.models.values())), None
        if name in self.models:
            return self.models[name], None
        for model in self.models.values():
            profile = name.removeprefix(f"{model.name}:")
            if profile != name and profile in model.profiles:
                return model, profile
        known = ", ".join(other for model in self.models.values() for other in model.names)
        raise ApiError(
            404, f"no model {name[:200]!r} (there are: {known})", param="model", code="model_not_found"
        )

    # --- opening and closing ---

    async def take(self, name: str | None, cleanup: ExitStack) -> tuple[LoadedModel, str | None]:
        """The open model of a name, and the profile after its colon. It is opened if it is not, and stays
        open until `cleanup` is closed. Raises ApiError.
        """
        model, profile = self.find(name)
        if model.opened is None or self._needs_room:  # then all wait, or a busy model would keep its place
            async with self._turn:
                opened = model.opened or await self._open(model)
        else:
            opened = model.opened
        opened.users += 1
        cleanup.callback(opened.release)
        model.used = next(self._uses)
        return opened, profile

    async def _open(self, model: Model) -> LoadedModel:
        try:
            while self._is_over(model):
                if not await self._close_one():
                    self._needs_room = True
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            self._needs_room = False
        return await _to_the_end(self._opened(model))

    async def _opened(self, model: Model) -> LoadedModel:
        model.state = "loading"
        try:
            while (opened := await self._attempt(model)) is None:
                pass
        except BaseException:
            model.state = "failed"
            raise
        with self._lock:
            if not self._is_closed:
                model.opened, model.state = opened, "loaded"
                return opened
        model.state = "unloaded"
        await asyncio.to_thread(opened.close, 0)
        raise ApiError(503, f"{model.name} is shutting down", code="closing")

    async def _attempt(self, model: Model) -> LoadedModel | None:
        """Open a model. None if it lacked memory, and another one was closed. Raises ApiError."""
        try:
            return await asyncio.to_thread(self._new, model)
        except Exception as error:  # a file system and libraries raise their own
            reason = str(error) if isinstance(error, MarsError) else f"{type(error).__name__}: {error}"
            lacks_memory = isinstance(error, MemoryError) or getattr(error, "code", "") == "out_of_memory"
            LOG.debug("traceback", exc_info=error)
        await asyncio.to_thread(_free)  # the error referred to the session of a failed first step
        if lacks_memory and await self._close_one():
            return None
        LOG.error("%s cannot be opened: %s", model.name, reason)
        raise ApiError(503, f"{model.name} cannot be opened; see the server's log", code="failed")

    def _new(self, model: Model) -> LoadedModel:
        assert isinstance(model.source, LazyModel), "a session is open from the start"
        opened = LoadedModel(model.name, model.source.open(), self._options)
        opened.warm()
        if opened.fault is not None:
            raise opened.fault
        return opened

    def _is_over(self, model: Model) -> bool:
        """Whether `model` does not fit beside the open ones."""
        options = self._options
        others = [other for other in self.models.values() if other.opened is not None]
        if options.max_models is not None and len(others) >= options.max_models:
            return True
        num_bytes = sum(other.num_bytes for other in (*others, model))
        return bool(others) and options.max_model_bytes is not None and num_bytes > options.max_model_bytes

    async def _close_one(self) -> bool:
        """Close the model that was not used for the longest time. False if all are in use."""
        idle = [model for model in self.models.values() if model.can_close]
        if not idle:
            return False
        model = min(idle, key=lambda model: model.used)
        opened, model.opened, model.state = [model.opened], None, "unloaded"
        LOG.info("closing %s", model.name)
        await _to_the_end(asyncio.to_thread(_close, opened))
        return True

    # --- health ---

    @property
    def is_ready(self) -> bool:
        return not self._is_closed and all(model.is_ready for model in self.opened.values())

    @property
    def is_live(self) -> bool:
        """False if only a new process helps: a bundle cannot be served any more, or a step hangs."""
        return not self.faults and not any(model.hangs for model in self.opened.values())

    @property
    def faults(self) -> dict[str, BaseException]:
        """The names of open bundles that cannot be served, with the reasons."""
        return {name: model.fault for name, model in self.opened.items() if model.fault is not None}

    def close(self, drain: float) -> None:
        """Refuse new requests, and end after running ones, in at most `drain` seconds."""
        with self._lock:
            self._is_closed = True
        threads = [threading.Thread(target=model.close, args=(drain,)) for model in self.opened.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which goes on if the caller is cancelled. The caller then waits for its end, so
    that the next turn begins after it.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})


def _close(opened: list[LoadedModel | None]) -> None:
    """Close a model and free its memory; the list has the only reference to it."""
    if (model := opened.pop()) is not None:
        model.close(0)
        del model
    _free()


def _free() -> None:
    """Free a closed session, which refers to itself, and return its memory to the system."""
    gc.collect()
    machine.trim()
