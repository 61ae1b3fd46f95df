"""Prompts: big ones are measured first and block nobody, and what is no prompt is refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.batchers import LONG, SHORT, SOON
from support.stalling import Stalling

from mars_export import Batcher, Overloaded, SessionError


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
