"""Exact mode: whatever is proposed, the answer is the one-token answer; and it hardly ever costs more."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agreement import MAIN, NEW, PROMPTS
from support.chaos import BLOCK, RANDOM_COSTS, ChaoticOracle, chaotic
from support.fake import MASK, FakeBackend
from support.fixtures import Sessions
from support.loops import NoText, decode, outcomes, planner_of
from support.oracle import generate

from mars_export import GenerationConfig
from mars_export.runtime.decode.backend import Cache, Predictions, StepInput, StepOutput
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import CURVES, Cost, LearnedCost, built_in
from mars_export.runtime.decode.speculation.drafts import (
    LAST_PROMPTS,
    MAX_LOOKUP,
    AcceptanceRates,
    DraftTokens,
    PromptLookup,
)
from mars_export.runtime.decode.speculation.planner import StepPlanner

CONFIGS = st.builds(
    GenerationConfig,
    tau=st.sampled_from([None, None, None, 0.5, 1.0]),
    max_new_tokens=st.integers(1, 20),
    masks=st.sampled_from(["auto", "auto", "full", 0, 1, 2]),
    eos_ids=st.sampled_from([(), (3,), (1, 7)]),
)
ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=12), CONFIGS), min_size=1, max_size=5
)


class Guesser(PromptLookup):
    """Proposes what it likes: right tokens, wrong ones, ends, too many."""

    def __init__(self, seed: int) -> None:
        super().__init__(1)
        self.draw = random.Random(seed)

    def propose(self, tokens: abc.Sequence[int], most: int) -> DraftTokens:
        known, guesses = list(tokens), []
        for _ in range(self.draw.randrange(most + 3)):
            right = chaotic(tuple(known), 0)[0]
            guesses.append(right if self.draw.random() < 0.7 else self.draw.randint(1, 9))
            known.append(guesses[-1])
        return DraftTokens(tuple(guesses), tuple(self.draw.random() for _ in guesses), "prompt_lookup")


@settings(max_examples=100)
@given(
    seqs=ROWS,
    cost=RANDOM_COSTS,
    capacity=st.integers(12, 60),
    chunk=st.integers(1, 6),
    most=st.none() | st.integers(5, 9),
    outputs=st.none() | st.integers(4, 7),
    guessing=st.booleans(),
    max_rows=st.integers(1, 5),
)
def test_any_draft_tokens_give_the_one_token_text(
    seqs: list[tuple[list[int], GenerationConfig]],
    cost: Cost,
    capacity: int,
    chunk: int,
    most: int | None,
    outputs: int | None,
    guessing: bool,
    max_rows: int,
) -> None:
    backend = FakeBackend(chaotic, capacity, most, outputs)
    schedule = Schedule(backend, BLOCK, MASK, Limits(max_rows, prefill_tokens=chunk), planner_of(cost))
    batch = [Sequence(i, prompt, config, ()) for i, (prompt, config) in enumerate(seqs)]
    for seq in batch:
        if guessing:
            seq.prompt_lookup = Guesser(seq.index)
        schedule.add(seq)
    events: dict[int, list[int]] = {seq.index: [] for seq in batch}
    while not schedule.is_idle:
        for event in outcomes(schedule):
            assert event.error is None
            events[event.seq] += event.token_ids
    assert max(step.slots for step in backend.steps) <= (most or 10**9)
    assert max(step.output_index.shape[1] for step in backend.steps) <= (outputs or 10**9)
    for seq, (prompt, config) in zip(batch, seqs, strict=True):
        if not config.exact and config.tau != 1.0:
            continue
        answer = generate(
            ChaoticOracle(), prompt, 1.0, "probability", config.max_new_tokens, config.eos_ids or (),
            capacity=capacity,
        )  # fmt: skip
        assert seq.tokens[len(prompt) :] == answer.tokens == events[seq.index]
        assert seq.finish_reason == answer.reason
        assert 0 <= seq.stats.accepted_draft_tokens <= seq.stats.draft_tokens
        assert seq.stats.tokens == seq.stats.accepted_draft_tokens + sum(seq.stats.accepted.values())


def test_a_stop_string_within_verified_draft_tokens_counts_all_that_stay() -> None:
    seq = Sequence(0, [1], GenerationConfig(), (), NoText(lambda token: token == 6))
    seq.cursor, seq.draft_tokens = 1, DraftTokens((5, 6, 7), (0.9, 0.9, 0.9))
    sure = np.ones(4)
    event = seq.accept(Predictions(np.array([5, 6, 7, 8]), sure, sure, None), 3)
    assert event is not None
    assert (event.token_ids, event.finish_reason, event.accepted_draft_tokens) == ((5, 6), "stop", 2)
    assert (seq.stats.accepted_draft_tokens, seq.cursor) == (2, 2), "the last token is not final"


@settings(max_examples=60)
@given(switches=st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=1, max_size=12))
def test_exact_and_tau_may_be_switched_while_a_row_runs(switches: list[float | None]) -> None:
    seq = Sequence(0, [3, 4], GenerationConfig(max_new_tokens=40), ())
    known = [3, 4]
    for n, events in enumerate(decode(FakeBackend(chaotic), [seq], BLOCK, MASK)):
        for event in events:
            if seq.config.exact or seq.config.one_token:
                for token in event.token_ids:
                    assert token == chaotic(tuple(known), 0)[0], "what the model says of all that is known"
                    known.append(token)
            else:
                known += event.token_ids
        tau = switches[n] if n < len(switches) else None
        seq.change(**({"exact": True} if tau is None else {"tau": tau}))
    assert seq.tokens == known


# --- on real graphs ---


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 11},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {7: 3, 8: -100}},
        {"temperature": 0.8, "presence_penalty": -1.0, "frequency_penalty": -0.5, "seed": 4},
        {"temperature": 1.2, "repetition_penalty": 1.1, "metric": "entropy", "seed": 2**63},
    ],
)
def test_sampled_text_is_that_of_one_token_sampling_with_the_same_seed(
    changes: dict[str, object], sessions: Sessions
) -> None:
    exact = GenerationConfig(max_new_tokens=NEW, eos_ids=()).with_values(**changes)
    one = exact.with_values(tau=0.0 if exact.metric == "entropy" else 1.0)
    for prompt in PROMPTS:
        assert (
            sessions(MAIN).generate(prompt, exact).token_ids == sessions(MAIN).generate(prompt, one).token_ids
        )


def test_lookup_finds_the_latest_occurrence_before_the_end() -> None:
    prompt_lookup = PromptLookup(2)
    assert prompt_lookup.propose([1, 2, 3], 5).token_ids == ()
    assert prompt_lookup.propose([1, 2, 3, 9, 1, 2], 5).token_ids == (3, 9, 1, 2)
    assert prompt_lookup.propose([1, 2, 3, 9, 1, 2, 4, 1, 2], 2).token_ids == (4, 1)
    assert prompt_lookup.propose([7], 2).token_ids == ()
    long = PromptLookup(2).propose([i % 500 for i in range(1500)], 1000)
    assert len(long) == MAX_LOOKUP, "a wider step is not worth its cost, nor the time to choose it"


# --- how much to propose ---

Points = tuple[tuple[int, float], ...]
COSTS: dict[str, Points] = {
    "fp32": ((1, 33.0), (2, 33.0), (4, 35.0), (8, 42.3), (15, 48.9), (32, 70.0)),
    "int4": ((1, 10.5), (2, 11.7), (4, 15.7), (8, 23.0), (16, 35.7), (32, 60.0)),
    "flat": ((1, 10.0), (32, 10.1)),
    "as many times as slots": ((1, 10.0), (32, 320.0)),
    "recurrent": ((1, 1.0), (4, 1.08), (8, 1.18), (15, 1.55), (32, 2.6)),  # docs/families.md
}
TOKENS = 300
DRAWS = random.Random(9).choices(range(1000), k=(TOKENS + 40) * 20)


def spoken(position: int) -> int:
    return 1 + (position * 7919) % 97


class Speaker(FakeBackend):
    """Says `spoken`; its masks are right with the chance that they claim. Behind a wrong word it raves."""

    def __init__(self, chance: Callable[[int], float]) -> None:
        super().__init__(chaotic)
        self.chance, self.sizes = chance, [0]

    def mask(self, at: int, masks: int) -> tuple[int, float]:
        """What the last of `masks` masks says, and the confidence."""
        sure = self.chance(at - masks) ** masks
        return (spoken(at) if DRAWS[at * 20 + masks] < 1000 * sure else 99), sure

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:  # noqa: ARG002
        input_ids, kv_length, output_index = inputs
        self.sizes.append(input_ids.size)
        token_ids, confidence = (
            np.zeros(output_index.shape, np.int64),
            np.zeros(output_index.shape, np.float32),
        )
        for i, start in enumerate(kv_length.tolist()):
            said, raves, masks = [], False, 0
            for slot, token in enumerate(input_ids[i].tolist()):
                at = start + slot + 1
                masks += token == MASK
                raves = raves or (token != MASK and token != spoken(at - 1))
                own = (spoken(at), 0.8) if masks == 0 else self.mask(at, masks)
                said.append((98, 0.3) if raves else own)
            for j, slot in enumerate(output_index[i].tolist()):
                token_ids[i, j], confidence[i, j] = said[slot]
        return StepOutput(token_ids, confidence)


def seconds(chance: Callable[[int], float], costs: str, seqs: int, **changes: object) -> float:
    """What the steps of some sequences cost, from the second of each on."""
    cost, backend = Cost(COSTS[costs]), Speaker(chance)
    config = GenerationConfig(max_new_tokens=TOKENS, eos_ids=()).with_values(**changes)
    batch = [Sequence(i, [spoken(0)], config, ()) for i in range(seqs)]
    for _ in decode(backend, batch, 8, MASK, planner_of(cost)):
        pass
    assert all(seq.tokens == [spoken(i) for i in range(TOKENS + 1)] for seq in batch)
    return sum(cost.of(size) for size in backend.sizes[1 + seqs :])


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("sure", [0.0, 0.6, 1.0])
def test_exact_is_never_much_slower_than_one_token_and_near_the_best_masks(
    sure: float, costs: str, seqs: int
) -> None:
    predict = lambda position: sure  # noqa: E731
    auto = seconds(predict, costs, seqs)
    assert seconds(predict, costs, seqs, tau=1.0) / auto >= (0.98 if costs == "recurrent" else 0.97)
    assert min(seconds(predict, costs, seqs, masks=w) for w in (0, 1, 2, 4, 7)) / auto >= 0.93


@pytest.mark.parametrize(("seqs", "sure", "masks"), [(1, 1.0, 9), (8, 1.0, 9), (8, 0.3, 3), (16, 0.3, 3)])
def test_a_prompt_has_as_many_masks_as_pay(seqs: int, sure: float, masks: int) -> None:
    backend, rates = Speaker(lambda _: sure), AcceptanceRates()
    for _ in range(LAST_PROMPTS):
        rates.record_prompt([sure])
    config = GenerationConfig(max_new_tokens=20, eos_ids=())
    batch = [Sequence(i, [spoken(0)], config, (), acceptance_rates=rates) for i in range(seqs)]
    for _ in decode(backend, batch, 8, MASK, planner_of(built_in("w8a8", "cpu"))):
        pass
    assert backend.sizes[1 : 1 + seqs] == [1 + masks] * seqs, "all if the text is predictable, else a few"


Right = Callable[[int, int], bool]
"""(position, number of the draft token) -> whether a draft token there is right"""


class Claimed(Speaker):
    """A Speaker whose masks are right where `right` says so, and always claim the same."""

    def __init__(self, right: Right, claim: float) -> None:
        super().__init__(lambda _: 0.0)
        self.right, self.claim = right, claim

    def mask(self, at: int, masks: int) -> tuple[int, float]:
        return (spoken(at) if self.right(at - masks, masks) else 99), self.claim


class Lookup(PromptLookup):
    """Always finds something, with the tokens of a Claimed."""

    def __init__(self, right: Right, claim: float) -> None:
        super().__init__(1)
        self.source = Claimed(right, claim)

    def propose(self, tokens: abc.Sequence[int], most: int) -> DraftTokens:
        at = range(len(tokens), len(tokens) + min(most, MAX_LOOKUP))
        found = [self.source.mask(position, position - len(tokens) + 1) for position in at]
        return DraftTokens(*zip(*found, strict=True), "prompt_lookup")  # type: ignore[arg-type]


def costs_by_token(source: str, right: Right, claim: float, points: Points, answers: int = 1) -> list[float]:
    """What each token costs beside one of a step without draft tokens, in the answers of one session."""
    cost, rates, made = Cost(points), AcceptanceRates(), []
    for answer in range(answers):
        moved: Right = lambda at, k, first=answer * TOKENS: right(first + at, k)  # noqa: E731
        masks = Claimed(moved, claim)
        most = None if source == "masks" else 0
        config = GenerationConfig(max_new_tokens=TOKENS, eos_ids=())
        seq = Sequence(0, [spoken(0)], config, (), acceptance_rates=rates, mask_limit=most)
        if source == "lookup":
            seq.prompt_lookup = Lookup(moved, claim)
        for events in decode(masks, [seq], 8, MASK, planner_of(cost)):
            num = sum(len(event.token_ids) for event in events)
            size = masks.sizes[-1] if len(masks.sizes) > 2 else 1  # not the prompt's
            made += [cost.of(size) / cost.of(1) / num] * num
        assert seq.tokens == [spoken(i) for i in range(TOKENS + 1)]
    return made


ALL_COSTS = COSTS | {name: built_in(name, "cpu").points for name in ("float32", "w8a8", "w4a8", "int8")}


@pytest.mark.parametrize("source", ["lookup", "masks"])
@pytest.mark.parametrize("costs", ALL_COSTS)
@pytest.mark.parametrize("claim", [0.5, 0.9, 0.99])
def test_draft_tokens_that_are_always_wrong_cost_at_most_two_percent(
    source: str, costs: str, claim: float
) -> None:
    tokens = costs_by_token(source, lambda *_: False, claim, ALL_COSTS[costs], 4)
    assert sum(tokens[:TOKENS]) / TOKENS <= 1.15, "they are believed at first"
    assert sum(tokens[TOKENS:]) / len(tokens[TOKENS:]) <= 1.02


@pytest.mark.parametrize("source", ["lookup", "masks"])
@pytest.mark.parametrize("costs", ["fp32", "w8a8", "recurrent"])
def test_a_source_that_changes_is_followed_within_some_tens_of_tokens(source: str, costs: str) -> None:
    tokens = costs_by_token(source, lambda at, _: at // TOKENS % 2 == 1, 0.9, ALL_COSTS[costs], 4)
    for first in (TOKENS, 3 * TOKENS):
        assert sum(tokens[first + 100 : first + TOKENS]) <= 0.5 * (TOKENS - 100), "right, after it was wrong"
    assert sum(tokens[2 * TOKENS :][:TOKENS]) <= 1.1 * TOKENS, "wrong, after it was right"
    assert sum(tokens[2 * TOKENS :][100:TOKENS]) <= 1.025 * (TOKENS - 100)


@pytest.mark.parametrize("costs", ALL_COSTS)
@pytest.mark.parametrize("source", ["lookup", "masks"])
def test_draft_tokens_that_are_half_right_cost_no_time(source: str, costs: str) -> None:
    right = lambda at, k: DRAWS[at % TOKENS * 20 + k] < 500  # noqa: E731
    assert sum(costs_by_token(source, right, 0.9, ALL_COSTS[costs], 4)) <= 1.02 * 4 * TOKENS


RECORD = LearnedCost.record  # all other tests learn nothing
QUIET = lambda draw, n, size: draw.lognormvariate(0, 0.04)  # noqa: E731
CLOCKS: dict[str, Callable[[random.Random, int, int], float]] = {  # how many times too long a step takes
    "quiet": QUIET,
    "busy": lambda draw, n, size: draw.lognormvariate(0.3, 0.35) * draw.choice([1] * 9 + [6]),
    "slow minutes": lambda draw, n, size: (3 if n // 150 % 2 else 1) * draw.lognormvariate(0, 0.06),
}


def learning_seconds(learned: LearnedCost, clock: Callable[..., float], sure: float, true: Cost) -> float:
    """As `seconds` of one sequence, with costs that are learned by `clock`."""
    draw, backend, steps = random.Random(3), Speaker(lambda _: sure), count()

    class Clocked:
        cost = property(lambda _: learned.cost)

        def record(self, seqs: int, slots: int, _: float) -> None:
            size = seqs * slots
            RECORD(learned, seqs, slots, true.of(size) * clock(draw, next(steps), size))

    seq = Sequence(0, [spoken(0)], GenerationConfig(max_new_tokens=TOKENS, eos_ids=()), ())
    for _ in decode(backend, [seq], 8, MASK, StepPlanner(Clocked())):
        pass
    return sum(true.of(size) for size in backend.sizes[2:])


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("costs", ["fp32", "int4"])
@pytest.mark.parametrize("sure", [0.0, 0.6, 0.95])
def test_no_clock_makes_learned_costs_much_worse_than_known_ones(sure: float, costs: str, clock: str) -> None:
    true, learned = Cost(COSTS[costs]), LearnedCost(Cost(CURVES["int4"]))
    known = seconds(lambda _: sure, costs, 1)
    for _ in range(2):
        learning_seconds(learned, CLOCKS[clock], sure, true)
    now = learning_seconds(learned, QUIET, sure, true)

    assert known / now >= 0.93
    assert seconds(lambda _: sure, costs, 1, tau=1.0) / now >= 0.97
