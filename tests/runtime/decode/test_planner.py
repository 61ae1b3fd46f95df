"""The adaptive number of masks on simulated text and cost tables: near the best fixed number, and hardly ever
slower than one token a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chaos import BLOCK as SMALL
from support.chaos import RANDOM_COSTS, chaotic
from support.fake import MASK, FakeBackend
from support.loops import decode, planner_of

from mars_export.runtime.decode.config import GenerationConfig, Masks
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost
from mars_export.runtime.decode.speculation.drafts import StepForecast
from mars_export.runtime.decode.speculation.planner import ExactPlanner, StepPlanner, TauPlanner

BLOCK = 8
TOKENS = 2500
Text = Callable[[int, int], bool]
"""(position, k) -> whether the prediction of the k-th mask after that position passes; k = 0 is the next
token's own
"""

# Milliseconds of a step by slots: the first two as measured for a 135M model on two cores, then extremes.
COSTS = {
    "fp32": ((1, 33.0), (2, 33.0), (4, 35.0), (8, 42.3), (15, 48.9)),
    "int4": ((1, 10.5), (2, 11.7), (4, 15.7), (8, 23.0), (16, 35.7)),
    "flat": ((1, 10.0), (16, 10.1)),
    "as many times as slots": ((1, 10.0), (16, 160.0)),
}


DRAWS = random.Random(7).choices(range(1000), k=(TOKENS + BLOCK) * BLOCK)


def drawn(position: int, k: int) -> float:
    """From 0 to 1, the same for every number of masks."""
    return DRAWS[position * BLOCK + k] / 1000


TEXTS: dict[str, Text] = {
    "never": lambda position, k: False,
    "never but the next token": lambda position, k: k == 0,
    "always": lambda position, k: True,
    "one in ten": lambda position, k: drawn(position, k) < 0.1,
    "three in ten": lambda position, k: drawn(position, k) < 0.3,
    "half": lambda position, k: drawn(position, k) < 0.5,
    "nine in ten": lambda position, k: drawn(position, k) < 0.9,
    "pairs": lambda position, k: k <= 1,
    "phases of 200": lambda position, k: position // 200 % 2 == 1,
}


class Walk:
    """A sequence whose steps are simulated: `text` tells what a mask predicts, `cost` what a step takes."""

    def __init__(self, text: Text, cost: Cost, planner: TauPlanner | None, config: GenerationConfig) -> None:
        self.seq = Sequence(0, [1], config, ())
        self.seq.block = BLOCK
        self.text, self.cost, self.planner = text, cost, planner
        self.seconds = 0.0
        self.fed: list[int] = []

    def step(self) -> None:
        seq = self.seq
        most = seq.max_masks()
        masks = self.planner.choose(self.cost, [seq], [most])[0] if self.planner is not None else most
        self.seconds += self.cost.of(seq.num_pending + masks)
        self.fed.append(masks)
        passed = [self.text(seq.stats.tokens, k) for k in range(masks + 1)]
        accepted = 1 + next((k for k in range(masks) if not passed[k + 1]), masks)
        seq.cursor = len(seq.tokens)
        seq.tokens += [1] * accepted
        seq.stats.count(accepted)
        seq.pass_rates.record(accepted, passed)

    def all(self) -> float:
        """Seconds of the whole text."""
        while self.seq.remaining > 0:
            self.step()
        return self.seconds


def time_of(text: str, costs: str, masks: Masks) -> float:
    cost = Cost(COSTS[costs])
    planner = TauPlanner() if masks == "auto" else None
    return Walk(
        TEXTS[text], cost, planner, GenerationConfig(tau=0.5, max_new_tokens=TOKENS, masks=masks)
    ).all()


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("text", TEXTS)
def test_auto_is_near_the_best_fixed_masks_and_never_much_slower_than_one_token(
    text: str, costs: str
) -> None:
    fixed = [time_of(text, costs, masks) for masks in (0, 1, 3, 7)]
    auto = time_of(text, costs, "auto")
    assert min(fixed) / auto >= 0.97
    assert fixed[0] / auto >= 0.97


def test_fixed_masks_and_one_token_rows_are_left_alone_and_need_no_costs() -> None:
    seqs = [Sequence(i, [1], GenerationConfig(tau=0.5, masks=w), ()) for i, w in enumerate((2, "full"))]
    seqs.append(Sequence(2, [1], GenerationConfig(tau=1.0), ()))
    for seq in seqs:
        seq.block = BLOCK
    plans = StepPlanner(None).plans(seqs, [20] * 3)  # type: ignore[arg-type]
    assert [plan.masks for plan in plans] == [2, 7, 0]
    free = Sequence(3, [1], GenerationConfig(tau=0.5), ())
    assert TauPlanner().choose(Cost(COSTS["int4"]), [*seqs, free], [2, 7, 0, 7])[:3] == [2, 7, 0]


@pytest.mark.parametrize("hope", [0.7, 0.9])
def test_a_looked_up_text_is_fed_whether_its_end_is_proposed_or_not(hope: float) -> None:
    def fed(ending: float | None) -> int:
        return (
            ExactPlanner()
            .choose(Cost(COSTS["flat"]), [StepForecast(1, (hope,) * 14, ending, (0.0,), 30)])[0]
            .draft_tokens
        )

    assert fed(None) == fed(hope) == 14


# --- the tokens ---

CONFIGS = st.builds(
    GenerationConfig,
    tau=st.sampled_from([0.0, 0.25, 0.5, 0.6, 1.0]),
    max_new_tokens=st.integers(1, 40),
    eos_ids=st.sampled_from([(), (3,)]),
    masks=st.sampled_from(["auto", "auto", 1]),
)
ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=8), CONFIGS), min_size=1, max_size=4
)


@settings(max_examples=30)
@given(seqs=ROWS, cost=RANDOM_COSTS)
def test_tokens_of_an_auto_row_are_those_of_the_same_masks_fixed_one_by_one(
    seqs: list[tuple[list[int], GenerationConfig]], cost: Cost
) -> None:
    prompt, config = seqs[0]
    config = config.with_values(masks="auto")
    backend = FakeBackend(chaotic)
    seq = Sequence(0, prompt, config, ())
    steps = list(decode(backend, [seq], SMALL, MASK, planner_of(cost)))
    masks = [int((step.input_ids == MASK).sum()) for step in backend.steps]
    again = Sequence(0, prompt, config.with_values(masks=masks[0]), ())
    for n, _ in enumerate(decode(FakeBackend(chaotic), [again], SMALL, MASK)):
        if n + 1 < len(masks):
            again.change(masks=masks[n + 1])
    assert again.tokens == seq.tokens
    assert again.stats.accepted == seq.stats.accepted
    assert len(steps) == again.stats.forwards
