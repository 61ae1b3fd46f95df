"""Places: a client leaves some to the others; whoever waits for one may give up and is told of the end."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.batchers import LONG, SHORT, SOON
from support.stalling import Stalling

from mars_export import Batcher, Counts, Overloaded, SessionError


def test_coroutines_wait_for_room_and_may_be_cancelled_there(stalled: tuple[Batcher, Stalling]) -> None:
    batcher, backend = stalled
    requests = [batcher.submit([1], SHORT)]
    assert backend.entered.wait(SOON)
    requests += [batcher.submit([1], SHORT) for _ in range(8)]

    async def main() -> int:
        with pytest.raises(Overloaded):
            await batcher.asubmit([2], SHORT, wait=0.02)
        impatient = asyncio.create_task(batcher.asubmit([2], SHORT, wait=None))
        patient = asyncio.create_task(batcher.asubmit([2], SHORT, wait=None))
        await asyncio.sleep(0.02)
        impatient.cancel()
        backend.gate.set()
        return len((await (await patient).aresult()).token_ids)

    assert asyncio.run(asyncio.wait_for(main(), SOON)) == 4
    assert all(len(request.result(SOON).token_ids) == 4 for request in requests)
    assert batcher.counts == Counts(accepted=10, finished=10, overloaded=1, prompt_tokens=10, tokens=40)


def test_whoever_waits_for_room_is_told_of_a_deadline_and_of_the_end(
    stalled: tuple[Batcher, Stalling],
) -> None:
    batcher, backend = stalled
    batcher.submit([1], LONG)
    assert backend.entered.wait(SOON)
    for _ in range(8):
        batcher.submit([1], LONG)
    with pytest.raises(Overloaded):
        batcher.submit([1], SHORT, wait=None, deadline=0.02)
    with pytest.raises(Overloaded):
        asyncio.run(batcher.asubmit([1], SHORT, wait=None, deadline=0.02))
    with ThreadPoolExecutor(2) as pool:
        late = [
            pool.submit(batcher.submit, [1], SHORT, wait=None),
            pool.submit(lambda: asyncio.run(batcher.asubmit([1], SHORT, wait=None))),
        ]
        time.sleep(0.05)
        batcher.close(timeout=0.01)
        for waiting in late:
            with pytest.raises(SessionError, match="this batcher is closed"):
                waiting.result(SOON)
