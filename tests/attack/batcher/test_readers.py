"""Readers of requests: event loops that end, a queue of several requests, and nothing kept too long."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from support.batchers import LONG, SHORT, SOON, goes_on

from mars_export import Batcher, Event, GenerationConfig, SessionError
from mars_export.runtime.batcher.request import Items, Request
from mars_export.runtime.decode.sequence import Sequence


def test_requests_may_share_a_queue(batcher: Batcher) -> None:
    async def main() -> dict[Request, list[Event]]:
        items = Items()
        requests = [await batcher.asubmit([i], SHORT, deadline=SOON) for i in range(4)]
        for request in requests:
            request.attach(items)
        found: dict[Request, list[Event]] = {request: [] for request in requests}
        while not all(events and events[-1].finish_reason for events in found.values()):
            request, item = await asyncio.wait_for(items.get(), SOON)
            assert request is not None and not isinstance(item, BaseException)
            if item is None:
                assert not found[request], "it starts before its first event"
            else:
                found[request].append(item)
        with pytest.raises(SessionError, match="already have a reader"):
            requests[0].attach(items)
        return found

    for request, events in asyncio.run(main()).items():
        assert tuple(t for event in events for t in event.token_ids) == request.completion.token_ids
        assert [event.finish_reason for event in events[-2:]] == [None, "length"]


def test_an_event_loop_that_ends_harms_nobody(batcher: Batcher) -> None:
    left: list[Request] = []

    async def main() -> None:
        left.append(await batcher.asubmit([1, 2], LONG, deadline=60))
        left.append(await batcher.asubmit([3], LONG, deadline=60))
        left[0].attach(Items())
        waiting = asyncio.ensure_future(left[1].aresult())
        await asyncio.sleep(0.01)
        waiting.cancel()

    asyncio.run(main())
    assert goes_on(batcher)
    for request in left:
        request.cancel()
        assert request.result(SOON).finish_reason in ("cancelled", "length")
    assert batcher.counts.failed == 0


def test_a_deadline_keeps_no_request_that_has_ended(batcher: Batcher) -> None:
    async def main() -> weakref.ref[Request]:
        request = await batcher.asubmit([1, 2], SHORT, deadline=3600)
        async for _ in request:
            pass
        kept = weakref.ref(request)
        del request
        for _ in range(100):
            gc.collect()
            if kept() is None:
                break
            await asyncio.sleep(0.01)
        return kept

    assert asyncio.run(main())() is None


def test_events_have_the_text_of_each_token(batcher: Batcher) -> None:
    config = GenerationConfig(tau=0.0, max_new_tokens=40, eos_ids=())
    whole = batcher.session.generate("light", config).text
    stop = whole[len(whole) // 2 :][:2]
    for each in (config, config.with_values(stop=(stop,))):
        for events in (list(batcher.session.stream("light", each)), list(batcher.submit("light", each))):
            assert all(len(event.texts) == len(event.token_ids) for event in events)
            texts, text = "".join(t for e in events for t in e.texts), "".join(e.text for e in events)
            assert text == batcher.session.generate("light", each).text
            if each is config:
                assert text[: len(texts)] == texts and len(text) - len(texts) <= 1  # half a character
            else:
                assert texts.startswith(text + stop)


def test_other_threads_end_a_sequence_and_change_it() -> None:
    seq = Sequence(0, [1], GenerationConfig(), ())
    with pytest.raises(SessionError, match="tau"):
        seq.change(tau=float("nan"))
    seq.change(tau=0.5)
    seq.end("deadline")
    seq.end("cancelled")
    assert seq.config.exact and seq.finish_reason is None, "the current step's"
    seq.refresh()
    assert seq.config.tau == 0.5 and not seq.config.exact
    assert seq.finish_reason == "deadline"


def test_events_are_read_once(batcher: Batcher) -> None:
    request = batcher.submit([1], SHORT)
    assert len(list(request)) >= 1
    with pytest.raises(SessionError, match="already have a reader"):
        list(request)
