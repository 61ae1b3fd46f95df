"""A turn for work in a thread, which goes on after its coroutine was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

Result = TypeVar("Result")


async def in_turn(turn: AbstractAsyncContextManager[None] | None, function: Callable[[], Result]) -> Result:
    """Run `function` in a thread during `turn`. If the caller is cancelled, it does not wait for the thread,
    which has the turn until it ends.
    """
    running = asyncio.ensure_future(_run(turn, function))
    try:
        return await asyncio.shield(running)
    finally:
        running.cancel()


async def _run(turn: AbstractAsyncContextManager[None] | None, function: Callable[[], Result]) -> Result:
    async with turn or nullcontext():
        thread = asyncio.ensure_future(asyncio.to_thread(function))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise
