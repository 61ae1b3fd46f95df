"""What happens to the requests of one client, in the order in which it happens: events, failures, the
client's leaving. Knows no form of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from enum import Enum
from typing import Any, Literal

from ..request import Request
from ..session import Event


class Gone(Enum):
    """The client's leaving."""

    GONE = "gone"


GONE = Gone.GONE
Happening = tuple[int, Event | BaseException] | Literal[Gone.GONE]
"""(which request, its event or what it failed with), or GONE."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Events:
    """Reads several requests at once. `close` ends the reading, which cancels those that still run."""

    def __init__(self, requests: list[Request], receive: Receive) -> None:
        self._queue: asyncio.Queue[Happening] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read(i, request)) for i, request in enumerate(requests)]
        self._watch = asyncio.create_task(self._listen(receive))

    async def next(self, seconds: float) -> Happening | None:
        """What happens next, None if nothing does within `seconds`."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None

    def put_back(self, happening: Happening) -> None:
        """It is the next again."""
        rest: list[Happening] = []
        while not self._queue.empty():
            rest.append(self._queue.get_nowait())
        for each in [happening, *rest]:
            self._queue.put_nowait(each)

    def close(self) -> None:
        for task in (*self._tasks, self._watch):
            task.cancel()

    async def _read(self, i: int, request: Request) -> None:
        try:
            async for event in request:
                self._queue.put_nowait((i, event))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a library's panic is no Exception
            self._queue.put_nowait((i, error))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(GONE)
