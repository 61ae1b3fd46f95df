"""The loop, with any cache block, on a backend without a model: cursors, masks, sequences that leave, and
what a stale entry would do.
"""

from __future__ import annotations

from collections import abc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chaos import BLOCK, ChaoticOracle, chaotic, rows_of
from support.fake import MASK, FakeBackend, FakeCache, scripted
from support.loops import decode
from support.oracle import generate

from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.event import Event
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.schedule import run as run_schedule
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.errors import SessionError


def run(backend: FakeBackend, seqs: abc.Sequence[Sequence], cache_block: int = 1) -> list[list[Event]]:
    return list(decode(backend, seqs, BLOCK, MASK, cache_block=cache_block))


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=12),
        st.builds(
            GenerationConfig,
            tau=st.sampled_from([0.0, 0.25, 0.5, 0.6, 1.0]),
            max_new_tokens=st.integers(1, 15),
            masks=st.just("full") | st.integers(0, 5),
            eos_ids=st.sampled_from([(), (3,), (1, 7)]),
        ),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300)
@given(
    seqs=ROWS,
    cache_block=st.just(1) | st.integers(1, 9),
    capacity=st.integers(12, 40),
    chunk=st.integers(1, 6),
)
def test_any_batch_decodes_as_each_row_alone(
    seqs: list[tuple[list[int], GenerationConfig]], cache_block: int, capacity: int, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mars_export.runtime.decode.limits.PREFILL_CHUNK", chunk)
        backend = FakeBackend(chaotic, capacity)
        batch = rows_of([prompt for prompt, _ in seqs], [config for _, config in seqs])
        events = run(backend, batch, cache_block)
    for seq, (prompt, config) in zip(batch, seqs, strict=True):
        rule = {
            "cache_block": cache_block,
            "capacity": capacity,
            "width": None if config.masks == "full" else config.masks + 1,
        }
        answer = generate(
            ChaoticOracle(),
            prompt,
            config.tau,
            "probability",
            config.max_new_tokens,
            config.eos_ids or (),
            **rule,
        )
        mine = [event for step in events for event in step if event.seq == seq.index]
        assert seq.tokens[len(prompt) :] == answer.tokens
        assert [token for event in mine for token in event.token_ids] == answer.tokens
        assert [len(event.token_ids) for event in mine if event.token_ids] == answer.runs
        assert seq.finish_reason == answer.reason
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [answer.reason]


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_copy_that_fails_ends_its_row_and_no_other(nth: int) -> None:
    class Failing(FakeCache):
        def move(self, source: int, target: int, length: int) -> None:
            super().move(source, target, length // 2 if len(self.moves) + 1 == nth else length)
            if len(self.moves) == nth:
                raise MemoryError

    def seqs() -> list[Sequence]:
        prompts = [[i + 1] * size for i, size in enumerate((9, 2, 7, 1, 4))]
        return rows_of(prompts, [GenerationConfig(tau=1.0, max_new_tokens=n) for n in (3, 9, 6, 2, 5)])

    backend, batch, alone = FakeBackend(chaotic), seqs(), seqs()
    backend.new_cache = Failing  # type: ignore[method-assign, assignment]
    schedule = Schedule(backend, BLOCK, MASK, Limits(3, prefill_tokens=2))
    [lost] = [event.seq for step in run_schedule(schedule, batch) for event in step if event.error]
    list(run_schedule(Schedule(FakeBackend(chaotic), BLOCK, MASK, Limits(3, prefill_tokens=2)), alone))
    assert [seq.tokens for seq in batch if seq.index != lost] == [
        seq.tokens for seq in alone if seq.index != lost
    ]


def test_no_mask_is_fed_for_a_token_that_may_not_be_generated() -> None:
    for cache_block in (1, 10):
        backend = FakeBackend(scripted([11, 12, 13, 14, 15, 16], [1.0, 1.0, 1.0, 0.1, 0.1, 0.1], 1))
        run(backend, rows_of([[1]], [GenerationConfig(tau=0.5, max_new_tokens=5)]), cache_block)
        assert [
            int((step.input_ids == MASK).sum()) for step in backend.steps if (step.input_ids == MASK).any()
        ] == [3, 1]


def test_a_block_is_written_once_it_is_full_and_never_looked_past() -> None:
    confidences = [1.0, 0.1, 1.0, 1.0, 1.0, 1.0]
    backend = FakeBackend(scripted([11, 12, 13, 14, 15, 16], confidences, 2))
    seq = rows_of([[1, 2]], [GenerationConfig(tau=0.5, max_new_tokens=6)])[0]
    events = run(backend, [seq], cache_block=3)
    fed = [(step.kv_length.tolist(), step.input_ids[0].tolist()) for step in backend.steps]
    assert fed == [
        ([0], [1, 2, 0, 0]),  # the prompt; 12 is not sure enough
        ([2], [11, 0]),  # accepts 12 13: the block is full
        ([2], [11, 12, 13, 0, 0]),  # accepts 14 15 16
    ]
    assert [event.token_ids for step in events for event in step] == [(11,), (12, 13), (14, 15, 16)]
    assert seq.stats.forwards == 3


def test_a_cache_block_beyond_the_slots_is_refused() -> None:
    backend = FakeBackend(chaotic, 60, max_slots=8)
    seqs = [Sequence(0, [1, 2, 3], GenerationConfig(max_new_tokens=4), ())]
    with pytest.raises(SessionError, match="a cache block of 9 tokens does not fit"):
        run(backend, seqs, cache_block=9)


@settings(max_examples=100)
@given(seqs=ROWS, cache_block=st.integers(2, 20), seed=st.integers(0, 9), has_slots=st.booleans())
def test_rows_of_blocks_in_a_busy_batch_have_their_text_and_exact_rows_theirs(
    seqs: list[tuple[list[int], GenerationConfig]], cache_block: int, seed: int, has_slots: bool
) -> None:
    """Fewer rows than sequences, chunks, an engine's slots, and neighbours in exact mode."""
    backend = FakeBackend(chaotic, 60, max_slots=cache_block + BLOCK if has_slots else None)
    configs = [c if i % 2 == seed % 2 else c.with_values(exact=True) for i, (_, c) in enumerate(seqs)]
    batch = rows_of([prompt for prompt, _ in seqs], configs)
    limits = Limits(1 + seed % 3, prefill_tokens=3, cache_block=cache_block)
    list(run_schedule(Schedule(backend, BLOCK, MASK, limits), batch))
    for seq, (prompt, _), config in zip(batch, seqs, configs, strict=True):
        width = 1 if config.exact else None if config.masks == "full" else config.masks + 1
        tau, size = (1.0, 1) if config.exact else (config.tau, cache_block)
        rule = {"max_new": config.max_new_tokens, "eos": config.eos_ids or (), "width": width}
        answer = generate(ChaoticOracle(), prompt, tau, cache_block=size, **rule)
        assert (seq.tokens[len(prompt) :], seq.finish_reason) == (answer.tokens, answer.reason)
