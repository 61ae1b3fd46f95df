"""Limits: what one request may ask for, the budget of KV memory, and limits that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from support.batchers import SHORT, SOON, goes_on

from mars_export import Batcher, GenerationConfig, Limits, Session, SessionError


def test_what_one_request_may_ask_for(session: Session) -> None:
    limits = Limits(max_prompt_tokens=10, max_new_tokens=20, max_stops=2)
    with Batcher(session, limits) as batcher:
        with pytest.raises(SessionError, match="the prompt has 11 tokens, 10 are allowed here; shorten"):
            batcher.submit([1] * 11, SHORT)
        with pytest.raises(
            SessionError, match="21 max_new_tokens are requested, .* at most 20; request fewer"
        ):
            batcher.submit([1], GenerationConfig(max_new_tokens=21))
        many = GenerationConfig(max_new_tokens=1, stop=("a", "b", "c"), eos_ids=(1, 2, 3))
        with pytest.raises(SessionError, match="3 stop strings are .*; 3 eos_ids are"):
            batcher.submit([1], many)
        good = GenerationConfig(max_new_tokens=20, stop=("a", "b"), eos_ids=())
        assert batcher.submit([1] * 10, good).result(SOON).finish_reason in ("length", "stop")
        assert batcher.counts.refused == 3


def test_a_request_that_never_fits_is_refused(session: Session) -> None:
    entry = session.kv_budget(1, None).entry_bytes
    with Batcher(session, Limits(kv_bytes=200 * entry)) as batcher:
        with pytest.raises(
            SessionError, match=r"100 tokens with max_new_tokens 256 may need .* MB .* \(kv_bytes\); shorten"
        ):
            batcher.submit([1] * 100)
        assert goes_on(batcher)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_rows": "8"}, "max_rows must be 1 or more, not '8'"),
        ({"max_rows": 1.5}, "max_rows must be 1 or more, not 1.5"),
        ({"max_waiting": float("nan")}, "max_waiting must be 1 or more, not nan"),
        ({"prefill_tokens": None}, "prefill_tokens must be 1 or more, not None"),
        ({"kv_bytes": 0}, "kv_bytes must be a number of bytes above 0, not 0"),
        ({"max_stops": True}, "max_stops must be 1 or more, not True"),
        ({"max_rows": 2**20 + 1}, "max_rows must be at most 1048576, not 1048577"),
        ({"max_waiting": 2**63 - 1}, "max_waiting must be at most 1048576"),
        ({"client_share": 0}, "client_share must be a number above 0, at most 1, not 0"),
        ({"client_share": float("nan")}, "client_share must be a number above 0"),
    ],
)
def test_limits_that_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SessionError, match=words):
        Limits(**wrong)
