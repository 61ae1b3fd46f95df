"""A replica: a process with a session and the server's application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from ray import serve

from ...errors import SessionError
from ...session.session import Session
from ..keys import read_keys
from ..logs import listen
from ..options import ServeOptions
from ..routes import app
from .call import Begun, Call, Part, Whole, ask, whole
from .fleet import Fleet, Share


class Replica:
    """Opens the bundle and warms it up. Ray routes to it when the constructor has returned."""

    def __init__(self, share: Share, fleet: Fleet) -> None:
        listen(fleet.log_level, fleet.log_format)
        self.id = serve.get_replica_context().replica_id.unique_id
        session = Session.open(
            share.path, share.device, threads=share.threads, variant=share.variant,
            accuracy_level=share.accuracy_level, cache_bytes=share.cache_bytes,
            prefix_dir=share.prefix_dir, prefix_bytes=share.prefix_bytes,
            safe=share.safe,
            parse_special=share.parse_special,
        )  # fmt: skip
        self._door = app({share.name: session}, with_keys(fleet, is_front=False))
        self._models = self._door.service.models
        self._models.warm()

    async def answer(self, call: Call) -> AsyncGenerator[Part, None]:
        """The parts of the answer, as they come."""
        yield Begun(self.id)
        async for part in ask(self._door, call):
            yield part

    async def whole(self, call: Call) -> Whole:
        """The whole answer, for requests to all replicas."""
        return Whole(self.id, *await whole(self._door, call))

    async def check_health(self) -> None:
        """Run a step, unless one is running. Raises SessionError."""
        for model in self._models.opened.values():
            await asyncio.to_thread(model.check)
        if not self._models.is_ready:
            raise SessionError("a step hangs, or the batcher has ended")

    def __del__(self) -> None:
        if hasattr(self, "_models"):
            self._models.close(0)


def with_keys(fleet: Fleet, *, is_front: bool) -> ServeOptions:
    """The options with the keys of this machine's file. Only the front checks hosts and origins."""
    options = fleet.options
    if fleet.key_file is not None:
        options = replace(options, keys=read_keys(Path(fleet.key_file)))
    return options if is_front else replace(options, hosts=None, cors_origins=())
