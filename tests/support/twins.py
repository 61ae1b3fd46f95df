"""What the Python runtime and libmars are both asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mars_export import GenerationConfig, Session
from mars_export.runtime.decode.stats import Stats
from support.cabi_session import CSession

PROMPT = [5, 9, 200, 17]
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "seed": 2**63 + 1},
    {"repetition_penalty": 1.4},
)


def same_steps(python: Session, libmars: CSession, prompt: Sequence[int], settings: dict[str, Any]) -> Stats:
    """Both decode `prompt` by the same steps to the same tokens; the statistics of Python's answer."""
    wanted, made = python.generate(prompt, GenerationConfig(**settings)), libmars.generate(prompt, **settings)
    assert made.token_ids == tuple(wanted.token_ids)
    for name in ("prefill_forwards", "forwards", "draft_tokens", "accepted_draft_tokens"):
        assert getattr(made, name) == getattr(wanted.stats, name), name
    return wanted.stats
