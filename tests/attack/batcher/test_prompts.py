"""Prompts: big ones are measured first and block nobody, and what is no prompt is refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.batchers import LONG, SHORT, SOON
from support.fake import MASK, FakeBackend
from support.loops import decode, outcomes
from support.stalling import Stalling
from support.unsure import predict

from mars_export import Batcher, Limits, Overloaded, SessionError
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence


def test_queue_and_length_are_looked_at_before_a_prompt_is_tokenized(
    stalled: tuple[Batcher, Stalling], monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, backend = stalled
    text = batcher.session.text
    assert text is not None
    monkeypatch.setattr(text, "tokenizer", None)  # whoever asks it fails with another error
    for prompt in ("light " * 2**20, [{"role": "user", "content": "light " * 2**20}]):
        with pytest.raises(SessionError, match="characters, .* at most .*; shorten it"):
            batcher.submit(prompt, SHORT)
    with pytest.raises(SessionError, match="the prompt has 10000000 tokens"):
        batcher.submit([1] * 10**7, SHORT)
    batcher.submit([1], LONG)
    assert backend.entered.wait(SOON)
    for _ in range(8):
        batcher.submit([1], LONG)
    with pytest.raises(Overloaded):
        batcher.submit("light", SHORT)
    batcher.close(timeout=0.01)
    with pytest.raises(SessionError, match="this batcher is closed"):
        batcher.submit("light", SHORT)


def test_the_event_loop_goes_on_while_a_prompt_is_tokenized(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = threading.Event()
    encode = batcher.session.encode

    def slowly(*arguments: Any) -> list[int]:
        assert tokenized.wait(SOON), "the event loop waited for the tokenizer"
        return encode(*arguments)

    monkeypatch.setattr(batcher.session, "encode", slowly)

    async def main() -> tuple[int, ...]:
        asyncio.get_running_loop().call_later(0.01, tokenized.set)
        request = await batcher.asubmit([9, 8, 7], SHORT)
        return (await request.aresult()).token_ids

    found = asyncio.run(main())
    monkeypatch.undo()
    assert found == batcher.session.generate([9, 8, 7], SHORT).token_ids


def schedule_of(lengths: list[int], limits: Limits) -> tuple[list[Sequence], list[int], FakeBackend]:
    """Rows of these prompts, in the order in which they got their first token."""
    backend = FakeBackend(predict)
    schedule = Schedule(backend, 4, MASK, limits)
    rows = [Sequence(i, [1 + i] * n, SHORT, ()) for i, n in enumerate(lengths)]
    for row in rows:
        schedule.add(row)
    order: list[int] = []
    while not schedule.is_idle:
        order += [event.seq for event in outcomes(schedule) if event.seq not in order]
    return rows, order, backend


@pytest.mark.parametrize("max_rows", [2, 3, 8])
def test_a_short_prompt_does_not_wait_for_a_long_one(max_rows: int) -> None:
    lengths = [1000, 5, 700, 40, 6]
    rows, order, _ = schedule_of(lengths, Limits(max_rows=max_rows, prefill_tokens=10))
    assert order.index(1) < order.index(0), "the short one answers first"
    assert order.index(3) < order.index(0)
    assert order.index(0) < order.index(2), "the long ones keep their order"
    for i, row in enumerate(rows):
        alone = Sequence(0, [1 + i] * lengths[i], SHORT, ())
        for _ in decode(FakeBackend(predict), [alone], 4, MASK):
            pass
        assert row.tokens == alone.tokens
        assert row.stats.prefill_forwards == -(-lengths[i] // 10) - 1, "in pieces of its own, as ever"


def test_a_long_prompt_goes_on_beside_any_number_of_short_ones() -> None:
    """Pieces are taken in turns: the long prompt gets every second one at least."""
    backend = FakeBackend(predict)
    schedule = Schedule(backend, 4, MASK, Limits(max_rows=8, prefill_tokens=10))
    long = Sequence(0, [1] * 100, SHORT, ())
    schedule.add(long)
    steps = 0
    while not long.stats.tokens:
        schedule.add(Sequence(1 + steps, [2, 3], SHORT, ()))
        outcomes(schedule)
        steps += 1
    assert steps <= 21
