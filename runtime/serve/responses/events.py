"""The events of several requests of one client in one queue, with failures and the client's disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from ...batcher.request import Request
from ...session.answer import Event
from ..refusals import Refused

ChoiceEvent = tuple[int, Event | BaseException]
"""(index of the request, its event or its error); Refused if the client has disconnected."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Events:
    """Reads several requests at once. `close` stops that, which cancels running ones."""

    def __init__(self, requests: list[Request], receive: Receive) -> None:
        self._queue: asyncio.Queue[ChoiceEvent] = asyncio.Queue()
        self._began = asyncio.Event()
        reading = [self._read(i, request) for i, request in enumerate(requests)]
        self._tasks = [asyncio.create_task(work) for work in (*reading, self._listen(receive))]

    async def next(self, seconds: float) -> ChoiceEvent | None:
        """The next entry, or None after `seconds`."""
        if self.has_more:
            return self._queue.get_nowait()
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._queue.get(), seconds)
        return None

    @property
    def has_more(self) -> bool:
        """Whether `next` returns at once."""
        return not self._queue.empty()

    async def begun(self) -> None:
        """Wait until a request has a row, or the queue has an entry."""
        await self._began.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read(self, i: int, request: Request) -> None:
        try:
            await request.begun()
            self._began.set()
            async for event in request:
                self._queue.put_nowait((i, event))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            self._add(i, error)

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._add(0, Refused(499, "the client went away"))

    def _add(self, i: int, error: BaseException) -> None:
        self._queue.put_nowait((i, error))
        self._began.set()
