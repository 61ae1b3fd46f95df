"""A semaphore whose waiting clients take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


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
