"""The adaptive window on simulated text and cost tables: near the best fixed window, and hardly ever slower
than one token a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chaos import BLOCK as SMALL
from support.chaos import ChaoticOracle, chaotic
from support.fake import MASK, FakeBackend
from support.loops import decode
from support.oracle import generate
from support.unsure import predict

from mars_export.runtime.decode.config import GenerationConfig, Window
from mars_export.runtime.decode.pace.cost import Cost
from mars_export.runtime.decode.pace.estimates import PassRates
from mars_export.runtime.decode.pace.policy import Policy
from mars_export.runtime.decode.row import Row
from mars_export.runtime.decode.schedule import Limits, Schedule

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
    """From 0 to 1, the same for every window."""
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
    """A row whose steps are simulated: `text` tells what a mask predicts, `cost` what a step takes."""

    def __init__(self, text: Text, cost: Cost, policy: Policy | None, config: GenerationConfig) -> None:
        self.row = Row(0, [1], config, ())
        self.text, self.cost, self.policy = text, cost, policy
        self.seconds = 0.0
        self.fed: list[int] = []

    def step(self) -> None:
        row = self.row
        most = row.most_masks(BLOCK)
        masks = self.policy.masks([row], [most])[0] if self.policy is not None else most
        self.seconds += self.cost.of(row.num_pending + masks)
        self.fed.append(masks)
        passed = [self.text(row.stats.tokens, k) for k in range(masks + 1)]
        accepted = 1 + next((k for k in range(masks) if not passed[k + 1]), masks)
        row.cursor = len(row.tokens)
        row.tokens += [1] * accepted
        row.stats.count(accepted)
        row.pass_rates.saw(accepted, passed)

    def all(self) -> float:
        """Seconds of the whole text."""
        while self.row.remaining > 0:
            self.step()
        return self.seconds


def time_of(text: str, costs: str, window: Window, few_sizes: bool = False) -> float:
    cost = Cost(COSTS[costs])
    policy = Policy(lambda: cost, few_sizes) if window == "auto" else None
    return Walk(
        TEXTS[text], cost, policy, GenerationConfig(tau=0.5, max_new_tokens=TOKENS, window=window)
    ).all()


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("text", TEXTS)
def test_auto_is_near_the_best_fixed_window_and_never_much_slower_than_one_token(
    text: str, costs: str
) -> None:
    fixed = [time_of(text, costs, window) for window in (1, 2, 4, 8)]
    auto = time_of(text, costs, "auto")
    assert min(fixed) / auto >= 0.97
    assert fixed[0] / auto >= 0.97


@pytest.mark.parametrize("costs", COSTS)
def test_a_device_that_prepares_each_size_gets_few_of_them(costs: str) -> None:
    cost = Cost(COSTS[costs])
    walk = Walk(
        TEXTS["half"],
        cost,
        Policy(lambda: cost, few_sizes=True),
        GenerationConfig(tau=0.5, max_new_tokens=500),
    )
    walk.all()
    assert set(walk.fed[:-10]) <= {0, 1, 3, 7}
    assert time_of("never", costs, 1) / time_of("never", costs, "auto", few_sizes=True) >= 0.97


def test_text_that_becomes_predictable_is_noticed() -> None:
    cost = Cost(COSTS["int4"])
    walk = Walk(
        lambda position, k: position >= 400,
        cost,
        Policy(lambda: cost),
        GenerationConfig(tau=0.5, max_new_tokens=1000),
    )
    walk.all()
    assert max(walk.fed[200:400]) <= 1
    assert walk.fed[470:480] == [7] * 10


def test_steps_that_all_cost_the_same_are_always_full() -> None:
    cost = Cost(((1, 1.0),))
    for text in TEXTS.values():
        walk = Walk(text, cost, Policy(lambda: cost), GenerationConfig(tau=0.5, max_new_tokens=300))
        walk.all()
        assert all(masks == 7 for masks in walk.fed[:-8])


def test_fixed_windows_and_one_token_rows_are_left_alone_and_need_no_costs() -> None:
    def unknown() -> Cost:
        raise AssertionError("nobody asked for auto")

    rows = [Row(i, [1], GenerationConfig(tau=0.5, window=w), ()) for i, w in enumerate((3, "full"))]
    rows.append(Row(2, [1], GenerationConfig(tau=1.0), ()))
    assert Policy(unknown).masks(rows, [2, 7, 0]) == [2, 7, 0]
    free = Row(3, [1], GenerationConfig(tau=0.5), ())
    assert Policy(lambda: Cost(COSTS["int4"])).masks([*rows, free], [2, 7, 0, 7])[:3] == [2, 7, 0]


def test_masks_beside_a_wide_fixed_row_are_free() -> None:
    cost = Cost(COSTS["as many times as slots"])
    rows = [Row(0, [1], GenerationConfig(tau=0.5, window=8), ()), Row(1, [1], GenerationConfig(tau=0.5), ())]
    rows[1].pass_rates.saw(1, [True] + [False] * 7)
    assert Policy(lambda: cost).masks(rows[1:], [7]) == [0]
    rows[0].pass_rates.saw(8, [True] * 8)
    assert Policy(lambda: cost).masks(rows, [7, 7])[1] >= 5


def test_expected_tokens_rise_with_the_masks_and_with_what_passed() -> None:
    acceptance = PassRates()
    before = acceptance.expected(7)
    assert before[0] == 1.0
    assert before == sorted(before)
    acceptance.saw(8, [True] * 8)
    after = acceptance.expected(7)
    assert after[7] > before[7]
    acceptance.saw(1, [True] + [False] * 7)
    assert acceptance.expected(7)[1] < after[1]
    assert acceptance.expected(2) == acceptance.expected(7)[:3]
    unchanged = PassRates()
    unchanged.saw(1, [True])
    assert unchanged.expected(3) == PassRates().expected(3)


def test_one_full_window_without_a_hit_tells_more_than_one_mask_without() -> None:
    narrow, full = PassRates(), PassRates()
    narrow.saw(1, [True, False])
    full.saw(1, [True] + [False] * 7)
    assert full.expected(1)[1] < narrow.expected(1)[1] - 0.1


def test_a_position_that_has_just_failed_is_believed_less_than_one_that_passed_behind_the_run() -> None:
    failed, passed = PassRates(), PassRates()
    failed.saw(1, [True, False, False, True])
    passed.saw(1, [True, False, True, False])
    assert failed.expected(1)[1] < passed.expected(1)[1]


def test_certainty_is_the_share_of_next_tokens_that_passed() -> None:
    acceptance = PassRates()
    assert acceptance.certainty == 1.0
    for _ in range(400):
        acceptance.saw(1, [False])
    assert acceptance.certainty < 0.06
    for _ in range(400):
        acceptance.saw(1, [True])
    assert acceptance.certainty > 0.99


def test_where_the_next_tokens_are_uncertain_little_time_goes_into_trials() -> None:
    def fed(text: str) -> int:
        cost = Cost(COSTS["int4"])
        walk = Walk(TEXTS[text], cost, Policy(lambda: cost), GenerationConfig(tau=0.5, max_new_tokens=500))
        walk.all()
        return sum(walk.fed)

    assert fed("never") * 4 < fed("never but the next token")


# --- the tokens ---

RANDOM_COSTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6).map(
    lambda s: Cost(tuple((2**i, v) for i, v in enumerate(s)))
)
CONFIGS = st.builds(
    GenerationConfig,
    tau=st.sampled_from([0.0, 0.25, 0.5, 0.6, 1.0]),
    max_new_tokens=st.integers(1, 40),
    eos_ids=st.sampled_from([(), (3,)]),
    window=st.sampled_from(["auto", "auto", 2]),
)
ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=8), CONFIGS), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(rows=ROWS, cost=RANDOM_COSTS, capacity=st.integers(12, 60))
def test_each_step_accepts_what_a_fixed_window_of_its_width_would_from_there(
    rows: list[tuple[list[int], GenerationConfig]], cost: Cost, capacity: int
) -> None:
    backend = FakeBackend(chaotic, capacity)
    batch = [Row(i, prompt, config, ()) for i, (prompt, config) in enumerate(rows)]
    known = {row.index: list(row.tokens) for row in batch}
    for accepted in decode(backend, batch, SMALL, MASK, Policy(lambda: cost)):
        widths = (backend.steps[-1].output_index != 0).sum(axis=1) if backend.steps else []
        for event in accepted:
            if not event.token_ids:
                continue
            row, prefix = batch[event.row], known[event.row]
            full = generate(
                ChaoticOracle(),
                prefix,
                row.config.tau,
                max_new=SMALL,
                eos=row.config.eos_ids or (),
                capacity=capacity,
            )
            full_run = full.tokens[: full.runs[0]]
            assert list(event.token_ids) == full_run[: len(event.token_ids)], (
                "a prefix of what the full window accepts"
            )
            assert len(event.token_ids) == len(full_run) or len(event.token_ids) <= max(map(int, widths)) + 1
            prefix += event.token_ids
    assert all(row.finish_reason for row in batch)


@settings(max_examples=30)
@given(rows=ROWS, cost=RANDOM_COSTS)
def test_tokens_of_an_auto_row_are_those_of_the_same_windows_fixed_one_by_one(
    rows: list[tuple[list[int], GenerationConfig]], cost: Cost
) -> None:
    prompt, config = rows[0]
    config = config.with_values(window="auto")
    backend = FakeBackend(chaotic)
    row = Row(0, prompt, config, ())
    steps = list(decode(backend, [row], SMALL, MASK, Policy(lambda: cost)))
    masks = [int((step.input_ids == MASK).sum()) for step in backend.steps]
    again = Row(0, prompt, config.with_values(window=masks[0] + 1), ())
    for n, _ in enumerate(decode(FakeBackend(chaotic), [again], SMALL, MASK)):
        if n + 1 < len(masks):
            again.config = config.with_values(window=masks[n + 1] + 1)
    assert again.tokens == row.tokens
    assert again.stats.accepted == row.stats.accepted
    assert len(steps) == again.stats.forwards


def test_rows_that_join_and_leave_keep_what_they_have_shown() -> None:
    cost = Cost(COSTS["int4"])
    schedule = Schedule(FakeBackend(predict), BLOCK, MASK, Limits(max_rows=3), Policy(lambda: cost))
    settings = [(0.5, "auto"), (0.9, "auto"), (1.0, "auto"), (0.5, 3), (0.2, "auto")]
    configs = [
        GenerationConfig(tau=tau, max_new_tokens=20 + i, window=window, eos_ids=())
        for i, (tau, window) in enumerate(settings)
    ]
    rows = [Row(i, [1 + i, 2], config, ()) for i, config in enumerate(configs)]
    for row in rows:
        schedule.add(row)
    while not schedule.is_idle:
        assert all(event.error is None for event in schedule.step())
    assert [row.stats.tokens for row in rows] == [20, 21, 22, 23, 24]
    assert [row.finish_reason for row in rows] == ["length"] * 5
