"""Saved prefixes of sessions over ONNX Runtime: what a hit restores has the very bits that reading gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.agreement import LOOPS, MAIN
from support.fixtures import Exported
from support.prefixes import PLENTY
from support.reproducible import reproducible as wide

from mars_export import Batcher, GenerationConfig, Limits, Session, SessionError
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.decode.batch import Batch
from mars_export.runtime.decode.sequence import Sequence as Row


@pytest.fixture(scope="module")
def reproducible(exported: Exported) -> Callable[[str], Path]:
    """Bundles by precision of a model whose entries do not depend on the size of a step."""
    return lambda kind: wide(exported, kind)


def twins(path: Path, cache_bytes: int = PLENTY) -> tuple[Session, Session]:
    return (
        Session.open(path, threads=1, cache_bytes=cache_bytes),
        Session.open(path, threads=1, cache_bytes=0),
    )


def asked(seed: int) -> list[tuple[list[int], GenerationConfig]]:
    """Turns of a few conversations with one beginning."""
    draw = random.Random(seed)
    system = [draw.randrange(250) for _ in range(30)]
    return [
        (
            system[: draw.choice((20, 30))] + [draw.randrange(250) for _ in range(draw.randint(1, 25))],
            GenerationConfig(
                max_new_tokens=draw.randint(1, 12), eos_ids=(), tau=draw.choice((None, 0.4, 0.8, 1.0))
            ),
        )
        for _ in range(5)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        *("fp32", "w8a8", "fp32 own", "w8a8 own", "w8a8 kv8", "w8a8 own kv8", "w4a8 own kv8"),
        *("fp32 states", "w8a8 states", "w4a8 states kv8"),
    ],
)
def test_entries_of_reproducible_steps_have_the_same_bits(
    kind: str, reproducible: Callable[[str], Path]
) -> None:
    """Read in pieces of any sizes from two slots on, with masks behind or not, beside other rows or not;
    where heads share their keys and where each has its own; with the states of recurrent layers.
    """
    backend = Session.open(reproducible(kind), threads=2, cache_bytes=0).backend
    assert backend.reproducible_slots == 2
    draw = random.Random(5)
    ids = [draw.randrange(250) for _ in range(150)]

    def entries(sizes: Sequence[int], rows: int, masks: int, capacity: int) -> list[np.ndarray]:
        held, at = backend.new_cache(rows), 0
        held.reserve(capacity)
        for size in sizes:
            size = min(size, len(ids) - at)
            others = [[draw.randrange(250) for _ in range(size + masks)] for _ in range(rows - 1)]
            slots = np.array([*others, [*ids[at : at + size], *[tiny.MASK] * masks]])
            held.reserve(at + size + masks, [at] * rows)
            index = np.full((rows, 1), size - 1)
            backend.step(held, 0, StepInput(slots, np.full(rows, at), index), False)
            at += size
        return held.save(rows - 1, 148)  # type: ignore[no-any-return]

    whole = entries([150], 1, 0, 0)
    for sizes, rows, masks, capacity in [
        ([64, 64, 22], 1, 0, 0),
        ([2] * 75, 1, 0, 400),
        ([3] * 50, 2, 0, 0),
        ([7] * 22, 1, 5, 0),
        ([37, 41, 72], 3, 2, 300),
        ([140, 5, 5], 1, 11, 0),
        *(
            ([draw.randint(2, 30) for _ in range(75)], draw.randint(1, 3), draw.randint(0, 6), 0)
            for _ in range(6)
        ),
    ]:
        for a, b in zip(whole, entries(sizes, rows, masks, capacity), strict=True):
            assert np.array_equal(a, b), (sizes, rows, masks)


def test_elsewhere_entries_depend_on_the_pieces(
    reproducible: Callable[[str], Path], bundles: Callable[[str], Path]
) -> None:
    for path in (reproducible("int8"), reproducible("fp16"), bundles(MAIN)):
        assert Session.open(path, threads=1).backend.reproducible_slots is None


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize(
    ("kind", "piece"), [("fp32", 7), ("w8a8", 16), ("w8a8 kv8", 16), ("int8", 7), ("narrow", 7)]
)
def test_answers_are_bit_for_bit_those_without_a_store(
    seed: int,
    loop: str,
    kind: str,
    piece: int,
    reproducible: Callable[[str], Path],
    bundles: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mars_export.runtime.decode.limits.PREFILL_CHUNK", piece)
    one, other = twins(bundles(MAIN) if kind == "narrow" else reproducible(kind))
    history: list[int] = []
    for ids, config in asked(seed):
        if loop != "cursor":
            config = config.with_values(tau=0.5)
        for prompt in (ids, history + ids):
            had = one.generate(prompt, config, cache_block=LOOPS[loop])
            wanted = other.generate(prompt, config, cache_block=LOOPS[loop])
            assert had.token_ids == wanted.token_ids
            assert had.confidences == wanted.confidences, "not only close"
        history = (history + ids + list(had.token_ids))[:200]
    assert one.prefix_stats.hits >= 6
    assert other.prefix_stats.queries == 0


def test_batches_say_the_same_and_share(reproducible: Callable[[str], Path]) -> None:
    one, other = twins(reproducible("fp32"))
    for seed in range(3):
        jobs = asked(seed)
        prompts, configs = [ids for ids, _ in jobs], [config for _, config in jobs]
        had, wanted = one.generate_batch(prompts, configs), other.generate_batch(prompts, configs)
        assert [c.token_ids for c in had] == [c.token_ids for c in wanted]
        assert sum(c.stats.cached_tokens > 15 for c in had) == 4, "all but the first"


def test_stream_generate_and_batcher_share(reproducible: Callable[[str], Path]) -> None:
    session, plain = twins(reproducible("fp32"))
    prompt, config = list(range(1, 80)), GenerationConfig(max_new_tokens=10, eos_ids=())
    wanted = plain.generate(prompt, config).token_ids
    assert session.generate(prompt, config).stats.cached_tokens == 0
    stream = session.stream(prompt, config)
    for _ in stream:
        pass
    with Batcher(session, Limits(max_rows=2)) as batcher:
        done = batcher.submit(prompt, config).result()
    assert stream.completion.token_ids == done.token_ids == wanted
    assert (stream.stats.cached_tokens, done.stats.cached_tokens) == (77, 77), (
        "two are fed: one slot is not reproducible"
    )
    assert done.stats.to_dict()["cached_tokens"] == 77
    session.forget_prefixes()
    assert session.prefix_stats.num_bytes == 0
    assert session.generate(prompt, config).stats.cached_tokens == 0


def test_nonsense_is_refused(bundles: Callable[[str], Any]) -> None:
    with pytest.raises(SessionError, match="cache_bytes must be 0 or more"):
        Session.open(bundles(MAIN), cache_bytes=-1)
    with pytest.raises(SessionError, match="cache_salt must be a text"):
        GenerationConfig(cache_salt=3)  # type: ignore[arg-type]


def test_memory_for_saved_entries_is_a_small_share(
    bundles: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, budget in ((None, 256 << 20), (1 << 30, 64 << 20), (1 << 40, 1 << 30)):
        monkeypatch.setattr("mars_export.runtime.machine.available", lambda free=free: free)
        assert Session.open(bundles(MAIN), threads=1)._prefixes.budget == budget


def test_the_system_message_is_an_entry_of_its_own(reproducible: Callable[[str], Path]) -> None:
    session, _ = twins(reproducible("fp32"))
    config = GenerationConfig(max_new_tokens=3)
    for question in ("the man", "an error"):
        session.generate(
            [{"role": "system", "content": "be the inner man"}, {"role": "user", "content": question}], config
        )
    fixed = [entry for entry in session._prefixes._entries.values() if entry.fixed]
    assert session.text is not None
    spelled = session.text.spelled(np.frombuffer(fixed[0].key, ">u4").tolist())
    assert len(fixed) == 1
    assert spelled.endswith("be the inner man<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("reproducible_slots", [2, None])
def test_nothing_behind_the_cursor_is_saved(
    reproducible_slots: int | None, reproducible: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN everywhere behind the row's cursor before each copy: nothing that was saved has one."""
    monkeypatch.setattr("mars_export.runtime.decode.limits.PREFILL_CHUNK", 7)
    one, other = twins(reproducible("fp32"))
    one._prefixes.reproducible_slots = reproducible_slots
    keep, kept = Batch.store, 0

    def poisoned(self: Batch, row: Row) -> None:
        nonlocal kept
        place, behind = self.active.index(row), slice(row.cursor, None)
        before = [buffer[place, :, behind].copy() for buffer in self.cache.buffers]  # type: ignore[attr-defined]
        for buffer in self.cache.buffers:  # type: ignore[attr-defined]
            buffer[place, :, behind] = np.nan
        keep(self, row)
        for buffer, entries in zip(self.cache.buffers, before, strict=True):  # type: ignore[attr-defined]
            buffer[place, :, behind] = entries  # 0 * NaN is NaN, behind a mask too
        kept += 1

    monkeypatch.setattr(Batch, "store", poisoned)
    history: list[int] = []
    for ids, config in asked(7) + asked(8):
        prompt = (history + ids)[:300]
        had = one.generate(prompt, config)
        assert had.confidences == other.generate(prompt, config).confidences
        history = prompt + list(had.token_ids)
        for entry in one._prefixes._entries.values():
            assert all(np.isfinite(array).all() for array in entry.saved.data)
    assert one.prefix_stats.hits >= 8
    assert kept >= 20
