"""Grammars over what a graph gives: top-k, logits, both or neither."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support import tiny
from support.agreement import MAIN
from support.fixtures import Exported
from support.questions import PROMPT

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.decode.backend import StepInput


@pytest.fixture(scope="module")
def bare(exported: Exported) -> Callable[[int, bool], Session]:
    """A session of a bundle with so many likeliest tokens, with logits or without."""
    return lambda top_k, logits: Session.open(
        exported(MAIN, top_k=top_k, logits=logits, metrics=True), threads=1
    )


def test_top_k_gives_the_answers_that_logits_give(
    bare: Callable[[int, bool], Session], session: Session
) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "bc", 12]}, "minItems": 2, "maxItems": 5}
    for metric in ("probability", "margin", "entropy"):
        for setting in ({"exact": True}, {"tau": 1.0 if metric != "entropy" else 0.0, "metric": metric}):
            config = GenerationConfig(schema=schema, **setting)
            expected = session.generate(PROMPT, config)
            for top_k, logits in ((256, False), (7, True)):
                found = bare(top_k, logits).generate(PROMPT, config)
                assert found.token_ids == expected.token_ids
                assert found.confidences == pytest.approx(expected.confidences, abs=1e-4)  # fmt: skip


def test_top_k_is_what_the_logits_say(bare: Callable[[int, bool], Session]) -> None:
    backend = bare(7, True).backend
    cache = backend.new_cache(1)
    cache.reserve(16)
    ids = np.array([[5, 17, 99, 4]])
    found = backend.step(cache, 0, StepInput(ids, np.array([0]), np.array([[0, 2, 3]])), True)
    assert found.logits is not None and found.topk_ids is not None and found.topk_logprobs is not None
    exact = found.logits - found.logits.max(-1, keepdims=True)
    logprobs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-found.logits, axis=-1, kind="stable")[..., :7]
    assert (found.topk_ids == order).all() and (found.topk_ids[..., 0] == found.token_ids).all()
    np.testing.assert_allclose(found.topk_logprobs, np.take_along_axis(logprobs, order, -1), atol=1e-5)
    assert not (found.topk_ids == tiny.MASK).any()


def test_without_either_output_the_request_is_refused_at_once(bare: Callable[[int, bool], Session]) -> None:
    session = bare(0, False)
    with pytest.raises(SessionError, match="logits or with --top-k 16"):
        session.generate(PROMPT, GenerationConfig(choice=("yes", "no")))
    assert session.generate(PROMPT, GenerationConfig(choice=("one way only",))).text == "one way only"


def test_where_no_allowed_token_is_among_the_likeliest_the_row_says_so(
    bare: Callable[[int, bool], Session],
) -> None:
    with pytest.raises(SessionError, match=r"none of the tokens that its top-k holds.*--no-logits"):
        bare(1, False).generate(PROMPT, GenerationConfig(regex="[a-z]{40}"))
