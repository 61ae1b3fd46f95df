"""Streams of libmars against those of Python: events, texts, stop strings, a new tau, a cancelled answer."""

from __future__ import annotations

from itertools import product

import pytest
from support.cabi import MarsStatusError
from support.cabi_session import CSession
from support.fixtures import Sessions
from support.twins import PROMPT

from mars_export import GenerationConfig


@pytest.mark.parametrize("stop", [(), ("e",), ("he", "an"), ("never",)])
def test_texts_and_stop_strings(stop: tuple[str, ...], twin: CSession, sessions: Sessions) -> None:
    python = sessions("llama")
    chat = [{"role": "user", "content": "the é 🙂"}]
    for prompt, tau in product(("hello the anon", chat), (None, 1.0, 0.3)):
        assert twin.encode(prompt) == python.encode(prompt)
        stream = python.stream(prompt, GenerationConfig(tau=tau, max_new_tokens=40, stop=stop, window="full"))
        wanted = [(e.text, list(e.token_ids), e.finish_reason) for e in stream]
        twin_stream = twin.stream(prompt, tau=tau, max_new_tokens=40, stop=stop)
        assert list(iter(twin_stream.next, None)) == wanted
        assert twin_stream.completion().text == stream.completion.text
        twin_stream.close()
    assert twin.decode(twin.encode("hello the é")) == "hello the é"


def test_a_stream_takes_a_new_tau_and_is_cancelled(twin: CSession, sessions: Sessions) -> None:
    stream = sessions("llama").stream(PROMPT, GenerationConfig(tau=1, max_new_tokens=30, eos_ids=()))
    twin_stream = twin.stream(PROMPT, tau=1, max_new_tokens=30, eos_ids=())
    runs = []
    for event in stream:
        runs.append(event.token_ids)
        made = twin_stream.next()
        assert made is not None and tuple(made[1]) == event.token_ids
        tau = (1.0, 0.2, 0.0)[len(runs) % 3]
        stream.tau = tau
        twin_stream.set_tau(tau)
        assert twin_stream.tau == tau
        if len(runs) == 6:
            stream.cancel()
            twin_stream.cancel()
    assert twin_stream.next() is None
    assert twin_stream.completion().finish_reason == stream.completion.finish_reason == "cancelled"
    with pytest.raises(MarsStatusError, match="tau must be a number of 0 or more"):
        twin_stream.set_tau(float("nan"))
    twin_stream.close()


def test_a_stream_goes_into_exact_mode_and_out_of_it(twin: CSession, sessions: Sessions) -> None:
    stream = sessions("llama").stream(PROMPT, GenerationConfig(max_new_tokens=40, eos_ids=(), window="full"))
    twin_stream = twin.stream(PROMPT, max_new_tokens=40, eos_ids=())
    assert twin_stream.tau is None
    for count, event in enumerate(stream):
        made = twin_stream.next()
        assert made is not None and tuple(made[1]) == event.token_ids
        tau = (None, None, 0.2, 0.0)[count % 4]
        if tau is None:
            stream.exact = True
        else:
            stream.tau = tau
        twin_stream.set_tau(tau)
        assert twin_stream.tau == stream.tau == tau
    assert twin_stream.next() is None
    made_stats = twin_stream.completion()
    assert (made_stats.proposed, made_stats.verified) == (stream.stats.proposed, stream.stats.verified)
    assert made_stats.proposed > 0
    twin_stream.close()


def test_a_callback_stops_an_answer(twin: CSession) -> None:
    seen: list[int] = []
    made = twin.generate(
        PROMPT,
        lambda event: bool(seen.extend(event.token_ids[: event.num_tokens])) or len(seen) >= 3,
        tau=1,
        eos_ids=(),
    )
    assert made.finish_reason == "cancelled"
    assert list(made.token_ids) == seen and len(seen) == 3
