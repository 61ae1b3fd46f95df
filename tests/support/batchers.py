"""What a batcher under attack is asked, short and long, and whether it goes on as ever."""

from __future__ import annotations

from mars_export import Batcher, GenerationConfig

SHORT = GenerationConfig(max_new_tokens=4, eos_ids=())
LONG = GenerationConfig(tau=1.0, max_new_tokens=400, eos_ids=())
SOON = 10.0  # seconds; what takes longer hangs


def goes_on(batcher: Batcher) -> bool:
    """Whether a batcher answers, and as ever."""
    expected = batcher.session.generate([9, 8, 7], SHORT).token_ids
    return batcher.alive and batcher.submit([9, 8, 7], SHORT).result(SOON).token_ids == expected
