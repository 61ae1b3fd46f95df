"""A model without weights whose every prediction depends on all that was seen, and its oracle."""

from __future__ import annotations

from collections import abc
from zlib import crc32

from hypothesis import strategies as st

from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost
from support.oracle import Oracle, Prediction

BLOCK = 4
RANDOM_COSTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6).map(
    lambda s: Cost(tuple((2**i, v) for i, v in enumerate(s)))
)


def rows_of(
    prompts: abc.Sequence[abc.Sequence[int]], configs: abc.Sequence[GenerationConfig]
) -> list[Sequence]:
    return [
        Sequence(i, prompt, config, ())
        for i, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]


def chaotic(known: tuple[int, ...], masks: int) -> tuple[int, float]:
    """Depends on every known token and on the number of masks; confidences are exact in float32."""
    digest = crc32(repr((known, masks)).encode())
    return 1 + digest % 9, (0.25, 0.5, 0.75, 1.0)[digest // 16 % 4]


class ChaoticOracle(Oracle):
    def __init__(self) -> None:
        self.block = BLOCK

    def predictions(self, prefix: abc.Sequence[int], count: int) -> list[Prediction]:
        made = [chaotic(tuple(prefix), masks) for masks in range(count)]
        return [Prediction(token, confidence, 0.0, 0.0) for token, confidence in made]
