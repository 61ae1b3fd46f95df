"""mars::Batcher on a real bundle, by the C interface: token for token what Python's Batcher gives."""

from __future__ import annotations

import ctypes as c
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.agreement import MAIN
from support.cabi import Library, MarsStatusError, build
from support.cabi_batcher import COUNTS, FOREVER, OVERLOADED, CBatcher, CLimits, CState
from support.cabi_session import CSession
from support.fixtures import Named, Sessions
from support.paths import ROOT

from mars_export import Batcher, GenerationConfig, Limits
from mars_export.runtime.batcher.places import Counts

GUIDE = (ROOT / "docs/cpp.md").read_text(encoding="utf-8")
ENDLESS: dict[str, Any] = {"tau": 1.0, "max_new_tokens": 400, "eos_ids": ()}
WORDS = ["the", "onion", "light", "turn", "on", "it", "is", "a", "board"]


@pytest.fixture(scope="module")
def opened(bundles: Named) -> Iterator[CSession]:
    library = Library(build() / "libmars.so")
    with CSession(library, bundles(MAIN), threads=1) as session:
        yield session


def asked(seed: int) -> tuple[Any, dict[str, Any]]:
    draw = random.Random(seed)
    text = " ".join(draw.choice(WORDS) for _ in range(draw.choice((1, 5, 40))))
    prompt: Any = draw.choice([text, [{"role": "user", "content": text}], [5 + seed % 90] * (seed % 60 + 1)])
    config: dict[str, Any] = {
        "tau": draw.choice((None, None, 1.0, 0.9, 0.4)),
        "window": draw.choice(("full", 2)),
    }
    config["max_new_tokens"] = draw.randint(1, 24)
    if draw.random() < 0.25:
        config |= {"temperature": 1.0, "seed": seed}
    if draw.random() < 0.2:
        config["stop"] = ["e"]
    return prompt, config


def test_the_words_of_both() -> None:
    assert set(Limits.__slots__) == {name for name, _ in CLimits._fields_} - {"struct_size"}
    assert all(f"`{name}`" in GUIDE for name in Limits.__slots__)
    assert set(Counts().to_dict()) == set(COUNTS)
    state = {name for name, _ in CState._fields_} - {"struct_size", *COUNTS}
    assert state == {"num_running", "num_waiting", "kv_usage", "step_seconds", "alive"}
    assert all(hasattr(Batcher, name) for name in state)


def test_many_threads_get_pythons_answers(opened: CSession, sessions: Sessions) -> None:
    seeds = range(36)
    found: dict[int, Any] = {}
    with CBatcher(opened, max_rows=4, prefill_tokens=32) as batcher:

        def work(mine: list[int]) -> None:
            for seed in mine:
                prompt, config = asked(seed)
                request = batcher.submit(prompt, wait=FOREVER, **config)
                tokens, text = [], ""
                while (event := request.next()) is not None:
                    text, tokens = text + event[0], tokens + event[1]
                found[seed] = (text, tuple(tokens), request.result())
                request.free()

        threads = [threading.Thread(target=work, args=(list(seeds[i::6]),)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        state = batcher.state
        assert (state.accepted, state.finished, state.num_running, state.num_waiting) == (36, 36, 0, 0)
        assert state.tokens == sum(len(tokens) for _, tokens, _ in found.values())
    with Batcher(sessions(MAIN), Limits(max_rows=4, prefill_tokens=32)) as python:
        wanted = {seed: python.submit(asked(seed)[0], GenerationConfig(**asked(seed)[1])) for seed in seeds}
        for seed in seeds:
            text, tokens, whole = found[seed]
            result = wanted[seed].result(60)
            assert (text, tokens, whole.finish_reason) == (
                result.text,
                result.token_ids,
                result.finish_reason,
            )
            assert (whole.text, whole.token_ids) == (text, tokens)
            assert whole.confidences == pytest.approx(result.confidences, abs=1e-4)
            accepted = {k: n for k, n in enumerate(whole.accepted) if n}
            assert accepted == result.stats.accepted
            assert (whole.proposed, whole.verified) == (result.stats.proposed, result.stats.verified)


def test_cancels_deadlines_and_a_full_queue(opened: CSession) -> None:
    with CBatcher(opened, max_rows=1, max_waiting=1) as batcher:
        began, gate = threading.Event(), threading.Event()

        def hold(_: Any) -> bool:
            began.set()
            return not gate.wait(60)

        running = batcher.submit([5, 6], on_event=hold, **ENDLESS)
        assert began.wait(60)  # the batcher's thread waits at the gate
        waiting = batcher.submit([7], **ENDLESS, deadline=0.01)
        with pytest.raises(MarsStatusError, match="requests wait already") as full:
            batcher.submit([8], **ENDLESS)
        assert full.value.status == OVERLOADED
        assert waiting.result().finish_reason == "deadline"  # although nothing moves
        assert (running.tau, running.finish_reason) == (1.0, None)
        running.set_tau(0.0)
        assert running.tau == 0.0
        gate.set()
        answer = running.result()
        assert answer.finish_reason == "length" and max(n for n, _ in enumerate(answer.accepted)) > 1
        cut = batcher.submit([5, 6], wait=FOREVER, **ENDLESS)
        cut.cancel()
        assert cut.result().finish_reason == "cancelled"
        seen: list[int] = []
        told = batcher.submit(
            [9, 9],
            wait=FOREVER,
            on_event=lambda event: seen.extend(event.token_ids[: event.num_tokens]) or len(seen) >= 5,
            **ENDLESS,
        )
        answer = told.result()
        assert answer.finish_reason == "cancelled" and list(answer.token_ids) == seen
        assert batcher.close(drain=1.0) and not batcher.state.alive
        with pytest.raises(MarsStatusError, match="this batcher is closed"):
            batcher.submit([8])
        for request in (running, waiting, cut, told):
            request.free()


def test_a_client_has_a_share(opened: CSession) -> None:
    with CBatcher(opened, max_rows=1, max_waiting=3, client_share=0.5) as batcher:
        mine = [batcher.submit([5, 6, i], client="a", **ENDLESS) for i in range(2)]
        with pytest.raises(MarsStatusError, match="this client has 2 requests here already"):
            batcher.submit([5], client="a", **ENDLESS)
        other = batcher.submit([5], client="b", tau=1.0, max_new_tokens=2)
        for request in mine:
            request.cancel()
        assert len(other.result().token_ids) == 2
        for request in (*mine, other):
            request.free()


def test_clients_take_turns_and_have_their_limit(opened: CSession) -> None:
    """A flood of one client delays nobody else, and leaves rows to others."""
    few = {"tau": 1.0, "max_new_tokens": 3, "eos_ids": ()}
    with CBatcher(opened, max_rows=2, max_rows_per_client=1, max_waiting=4) as batcher:
        began, gate = threading.Event(), threading.Event()

        def hold(_: Any) -> bool:
            began.set()
            return not gate.wait(60)

        held = batcher.submit([5, 6], client="flood", on_event=hold, **ENDLESS)
        assert began.wait(60)  # the batcher's thread waits at the gate
        flood = [batcher.submit([5, 6], client="flood", **few) for _ in range(4)]
        with pytest.raises(MarsStatusError, match=r"4 requests wait already \(max_waiting\)"):
            batcher.submit([5], client="flood")  # although a row is free: it is none of its
        other = batcher.submit([5, 6], client="other", **few)
        gate.set()
        assert other.result().finish_reason == "length"
        assert all(request.finish_reason is None for request in flood), "they wait for the first"
        held.cancel()
        assert [request.result().finish_reason for request in flood] == ["length"] * 4
        for request in (held, other, *flood):
            request.free()


def test_it_is_told_what_is_wrong(opened: CSession) -> None:
    library = opened.library
    for limits, words in (
        ({"max_rows": -1}, "max_rows must be 1 or more"),
        ({"max_rows_per_client": -1}, "max_rows_per_client must be 1 or more"),
        ({"max_rows": 2**20 + 1}, "max_rows must be at most 1048576, not 1048577"),
        ({"max_rows": 2**63 - 1, "max_waiting": 2**63 - 1}, "max_rows must be at most 1048576"),
        ({"max_waiting": 2**63 - 1}, "max_waiting must be at most 1048576"),
        ({"client_share": 2.0}, "client_share"),
    ):
        with pytest.raises(MarsStatusError, match=words):
            CBatcher(opened, **limits)
    with CBatcher(opened) as batcher:
        for config in ({"commit": "block"}, {"tau": -0.5}, {"max_new_tokens": 0}):
            with pytest.raises(MarsStatusError):
                batcher.submit([5], **config)
        with pytest.raises(MarsStatusError, match="wait must be seconds"):
            batcher.submit([5], wait=-2.0)
        handle, done = c.c_void_p(), c.c_int32()
        for name, arguments in (
            ("batcher_open", (None, None, c.byref(handle))),
            ("batcher_open", (opened.handle, None, None)),
            ("batcher_submit", (None, None, None, None, c.byref(handle))),
            ("batcher_submit", (batcher.handle, None, None, None, c.byref(handle))),
            ("batcher_submit", (batcher.handle, None, None, None, None)),
            ("request_next", (None, None, c.byref(done))),
            ("request_result", (None, c.c_double(0), c.byref(handle))),
            ("request_completion", (None, c.byref(handle))),
            ("request_set_tau", (None, c.c_double(0.5))),
            ("batcher_describe", (batcher.handle, None)),
            ("batcher_close", (None, c.c_double(0), c.c_double(0), None)),
        ):  # fmt: skip
            with pytest.raises(MarsStatusError, match="must not be NULL"):
                library.call(name, *arguments)
        for name in ("request_free", "request_cancel", "batcher_free"):
            getattr(library.c, f"mars_{name}")(None)
        assert library.c.mars_request_finish_reason(None) == 0
        assert batcher.state.accepted == 0
