"""The events of several requests of one client in one queue, with failures and the client's disconnect."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from enum import Enum
from typing import Any, Literal

from ...batcher.request import Request
from ...session.answer import Event


class Gone(Enum):
    """The client has disconnected."""

    GONE = "gone"


GONE = Gone.GONE
Happening = tuple[int, Event | BaseException] | Literal[Gone.GONE]
"""(index of the request, its event or its error), or GONE."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Events:
    """Reads several requests at once. `close` stops that, which cancels running ones."""

    def __init__(self, requests: list[Request], receive: Receive) -> None:
        self._happenings: deque[Happening] = deque()
        self._came = asyncio.Event()  # the queue has an entry
        self._began = asyncio.Event()  # a request has a row, or the queue has an entry
        self._tasks = [asyncio.create_task(self._read(i, request)) for i, request in enumerate(requests)]
        self._watch = asyncio.create_task(self._listen(receive))

    async def next(self, seconds: float) -> Happening | None:
        """The next entry, or None after `seconds`."""
        if not self._happenings:
            self._came.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._came.wait(), seconds)
        return self._happenings.popleft() if self._happenings else None

    @property
    def has_more(self) -> bool:
        """Whether `next` returns at once."""
        return bool(self._happenings)

    async def begun(self) -> None:
        """Wait until a request has a row, or the queue has an entry."""
        await self._began.wait()

    def close(self) -> None:
        for task in (*self._tasks, self._watch):
            task.cancel()

    async def _read(self, i: int, request: Request) -> None:
        try:
            await request.begun()
            self._began.set()
            async for event in request:
                self._happens((i, event))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            self._happens((i, error))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._happens(GONE)

    def _happens(self, happening: Happening) -> None:
        self._happenings.append(happening)
        self._came.set()
        self._began.set()
