"""Sequences that follow a grammar: whatever the steps are, the answer is the constrained model's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.automata import EOS, Automaton, Scoring, constrained, random_automaton
from support.fake import MASK
from support.loops import outcomes, planner_of

from mars_export import GenerationConfig, SessionError
from mars_export.runtime.decode.event import Event
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost
from mars_export.runtime.structured.constrained_sequence import ConstrainedSequence
from mars_export.runtime.structured.grammar_state import GrammarState

BLOCK = 4
CONFIGS = st.builds(
    GenerationConfig,
    tau=st.sampled_from([None, None, 0.3, 0.6, 1.0]),
    max_new_tokens=st.integers(1, 25),
    masks=st.sampled_from(["auto", "full", 0, 1, 2]),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    seed=st.integers(0, 3),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.3]),
    logit_bias=st.sampled_from([{}, {}, {3: 4.5, 5: -100, EOS: -2}]),
    top_logprobs=st.sampled_from([0, 0, 3, 20]),
    prompt_lookup=st.sampled_from([0, 1]),
)
ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
        CONFIGS,
        st.none() | st.integers(0, 10**6),  # of the grammar
        st.sampled_from([(EOS,), (EOS, EOS + 1), ()]),
    ),
    min_size=1,
    max_size=4,
)


def run(schedule: Schedule, seqs: list[Sequence]) -> dict[int, list[Event]]:
    for seq in seqs:
        schedule.add(seq)
    events: dict[int, list[Event]] = {seq.index: [] for seq in seqs}
    while not schedule.is_idle:
        for event in outcomes(schedule):
            events[event.seq].append(event)
    return events


@settings(max_examples=200)
@given(
    seqs=ROWS,
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([0, 2, 4]),
    cost=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    chunk=st.integers(1, 6),
    most=st.none() | st.integers(8, 9),
    max_rows=st.integers(1, 4),
    cache_block=st.sampled_from([1, 1, 3, 7]),
)
def test_any_cut_into_steps_gives_the_constrained_answer(
    seqs: list[tuple[list[int], GenerationConfig, int | None, tuple[int, ...]]],
    seed: int,
    top_k: int,
    cost: list[float],
    chunk: int,
    most: int | None,
    max_rows: int,
    cache_block: int,
) -> None:
    backend = Scoring(seed, top_k, has_logits=True, max_slots=most)
    table = Cost(tuple((2**i, seconds) for i, seconds in enumerate(cost)))
    limits = Limits(max_rows, prefill_tokens=chunk, cache_block=cache_block)
    schedule = Schedule(backend, BLOCK, MASK, limits, planner_of(table))
    batch = []
    for i, (prompt, config, grammar, eos) in enumerate(seqs):
        grammar_state = (
            None if grammar is None else GrammarState(random_automaton(grammar), eos, has_logits=True)
        )
        batch.append(
            ConstrainedSequence(i, prompt, config, eos, grammar_state=grammar_state)
            if grammar_state
            else Sequence(i, prompt, config, eos)
        )
    events = run(schedule, batch)
    for seq, (prompt, config, grammar, eos) in zip(batch, seqs, strict=True):
        given = [token for event in events[seq.index] for token in event.token_ids]
        assert [event.error for event in events[seq.index] if event.error] == []
        assert given == seq.tokens[len(prompt) :]
        assert len(given) == seq.stats.tokens == sum(len(e.confidences) for e in events[seq.index])
        assert seq.stats.tokens == seq.stats.forced + sum(k * n for k, n in seq.stats.accepted.items())
        tops = [top for event in events[seq.index] for top in event.top_logprobs]
        assert len(tops) == (len(given) if config.top_logprobs else 0)
        matcher = None if grammar is None else random_automaton(grammar)
        if config.exact or config.tau == 1.0:
            answer, expected_tops, reason = constrained(prompt, matcher, config, eos, seed)
            assert (given, seq.finish_reason) == (answer, reason)
            for top, expected in zip(tops, expected_tops, strict=False):
                assert [token for token, _ in top] == [token for token, _ in expected]
                assert [p for _, p in top] == pytest.approx([p for _, p in expected], abs=1e-5)
        elif matcher is not None:
            follows(matcher, given, eos)


def follows(matcher: Automaton, given: list[int], eos: tuple[int, ...]) -> None:
    """The answer obeys, whatever was accepted."""
    for token in given:
        if token in eos:
            assert matcher.may_end
            return
        assert matcher.mask()[token]
        matcher.consume(token)


def chain(*tokens: int) -> Automaton:
    """The one answer of these tokens."""
    edges = [*({token: i + 1} for i, token in enumerate(tokens)), dict[int, int]()]
    return Automaton(edges, frozenset({len(tokens)}), 100)


def test_a_context_that_what_is_forced_does_not_fit_ends_the_row() -> None:
    backend = Scoring(3, 9, has_logits=False, max_capacity=12)
    edges = [*({3: i + 1} for i in range(40)), {1: 41, 2: 41}, dict[int, int]()]
    grammar_state = GrammarState(Automaton(edges, frozenset({41}), 100), (EOS,), False)
    seq = ConstrainedSequence(0, [8], GenerationConfig(), (EOS,), grammar_state=grammar_state)
    run(Schedule(backend, BLOCK, MASK, Limits()), [seq])
    assert seq.finish_reason == "capacity" and seq.tokens == [8, *[3] * 40]


def test_a_refused_token_costs_one_more_forward_once() -> None:
    edges = [dict.fromkeys(range(1, EOS), 0)]
    backend = Scoring(4, 0, has_logits=True)
    grammar_state = GrammarState(Automaton([{1: 0, 2: 0}], frozenset({0}), 1), (EOS,), True)
    seq = ConstrainedSequence(
        0, [8], GenerationConfig(tau=1.0, max_new_tokens=12), (EOS,), grammar_state=grammar_state
    )
    state = GrammarState(Automaton(edges, frozenset({0}), 1), (EOS,), True)
    free = ConstrainedSequence(
        1, [8], GenerationConfig(tau=1.0, max_new_tokens=12), (EOS,), grammar_state=state
    )
    run(Schedule(backend, BLOCK, MASK, Limits(1)), [seq])
    assert seq.stats.forwards == seq.stats.tokens + 1
    before = backend.num_wide
    run(Schedule(backend, BLOCK, MASK, Limits(1)), [free])
    assert backend.num_wide == before and free.stats.forwards == free.stats.tokens


@pytest.mark.parametrize("top_k", [0, 1])
def test_without_logits_a_refused_token_ends_the_row_and_says_what_to_export(top_k: int) -> None:
    backend = Scoring(4, top_k, has_logits=False)
    grammar_state = GrammarState(Automaton([{1: 0, 2: 0}], frozenset({0}), 1), (), False)
    other = Sequence(1, [3], GenerationConfig(tau=1.0, max_new_tokens=30), ())
    seq = ConstrainedSequence(0, [8], GenerationConfig(max_new_tokens=30), (), grammar_state=grammar_state)
    events = run(Schedule(backend, BLOCK, MASK, Limits()), [seq, other])
    assert isinstance(events[0][-1].error, SessionError) and "--no-logits" in str(events[0][-1].error)
    assert other.finish_reason == "length", "what fails ends its own row only"


class Broken(Automaton):
    """Fails where it is asked."""

    def forced(self) -> list[int]:
        raise SessionError("the grammar broke")


@pytest.mark.parametrize("prompt", [[8], [8] * 20])
def test_a_grammar_that_fails_before_its_first_step_ends_its_own_row_only(prompt: list[int]) -> None:
    backend = Scoring(4, 9, has_logits=False)
    seq = ConstrainedSequence(
        0, prompt, GenerationConfig(), (), grammar_state=GrammarState(Broken([{}], frozenset(), 1), (), False)
    )
    others = [Sequence(i, [3] * 9, GenerationConfig(max_new_tokens=30), ()) for i in (1, 2)]
    events = run(Schedule(backend, BLOCK, MASK, Limits(prefill_tokens=4)), [others[0], seq, others[1]])
    assert [str(event.error) for event in events[0]] == ["the grammar broke"] and seq.tokens == prompt
    assert all(other.finish_reason == "length" for other in others)


class Unlikely(Automaton):
    """Finds nothing likely."""

    def likely(self) -> tuple[int, float] | None:
        return None


class Always(Scoring):
    """A model that wants one token."""

    def __init__(self, token: int) -> None:
        super().__init__(0, 9, has_logits=False)
        self.token = token

    def _predict(self, known: tuple[int, ...], masks: int) -> tuple[int, float]:
        super()._predict(known, masks)
        return self.token, 0.5


@pytest.mark.parametrize(("max_masks", "given"), [(3, [4, 5]), (64, [6, 6])])
def test_tau_accepts_nothing_of_masks_beyond_the_block(max_masks: int, given: list[int]) -> None:
    # Two of the five masks are beyond. What the first of them says has half a chance and is proposed: the
    # second step verifies it, goes on with a token of its own and with those of three masks.
    matcher = Unlikely([{1: 0, 2: 0}], frozenset(), 1)
    config = GenerationConfig(tau=0.4, masks="full", max_new_tokens=30)
    seq = ConstrainedSequence(
        0, [8], config, (EOS,), grammar_state=GrammarState(matcher, (EOS,), False, max_masks)
    )
    schedule = Schedule(Always(1), BLOCK, MASK, Limits())
    schedule.add(seq)
    assert [len(outcomes(schedule)[0].token_ids) for _ in range(2)] == given


def forcing(count: int, choices: int = 2) -> Automaton:
    """Rounds of one choice of two tokens and then `count` forced ones."""
    edges: list[dict[int, int]] = []
    for _ in range(choices):
        edges.append({1: len(edges) + 1, 2: len(edges) + 1})
        for i in range(count):
            edges.append({3 + i % 5: len(edges) + 1})
    return Automaton([*edges, {}], frozenset({len(edges)}), 10)


@settings(max_examples=60)
@given(
    counts=st.lists(st.sampled_from([0, 3, 9, 17, 60]), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    most=st.sampled_from([None, 9]),
    prefill=st.sampled_from([1, 5, 12]),
    tau=st.sampled_from([None, 1.0]),
)
def test_a_long_forced_text_waits_for_nobody_and_nobody_for_it(
    counts: list[int], seed: int, most: int | None, prefill: int, tau: float | None
) -> None:
    """One piece of it each step; the sequences beside it decode, wherever they stand."""
    backend = Scoring(seed, 4, has_logits=True, max_slots=most)
    schedule = Schedule(backend, BLOCK, MASK, Limits(4, prefill_tokens=prefill))
    config = GenerationConfig(tau=tau, max_new_tokens=140)
    grammar_states = [GrammarState(forcing(count), (EOS,), True) if count else None for count in counts]
    seqs = [
        ConstrainedSequence(i, [7, 8], config, (EOS,), grammar_state=grammar_state)
        if grammar_state
        else Sequence(i, [7, 8], config, (EOS,))
        for i, grammar_state in enumerate(grammar_states)
    ]
    for seq in seqs:
        schedule.add(seq)
    widest = min(max(prefill, 2 * BLOCK), most or 140)
    while not schedule.is_idle:
        before, steps = (
            [(seq, seq.num_pending, len(seq.tokens)) for seq in schedule.running],
            len(backend.steps),
        )
        assert all(event.error is None for event in outcomes(schedule))
        wide = [
            step for step in backend.steps[steps:] if step.slots == widest and step.input_ids[0, -1] != MASK
        ]
        assert len(wide) <= 2, "a piece of a prompt, a piece of a forced text"
        for seq, pending, length in before:
            if seq.cursor > 2 and pending < widest and seq.finish_reason is None:
                assert len(seq.tokens) > length, "who is not behind goes on"
    for seq, count in zip(seqs, counts, strict=True):
        if count:
            assert seq.tokens[2:] == constrained([7, 8], forcing(count), config, (EOS,), seed)[0]
    assert max(step.slots for step in backend.steps) <= max(widest, prefill) + 2 * BLOCK
