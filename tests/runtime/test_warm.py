"""Prefixes of a bundle: sessions begin with them, and say the very same, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agreement import LOOPS, MAIN
from support.firm import export_firm
from support.tiny import Named

from mars_export.runtime import Batcher, GenerationConfig, Limits, Session, SessionError
from mars_export.runtime.bundle import prefixes
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.bundle.pack import pack, unpack
from mars_export.runtime.decode.batch import Batch
from mars_export.runtime.errors import MarsWarning
from mars_export.runtime.prefix_maker import Beginning, make, read_entries
from mars_export.runtime.warm import read

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, bundles: Named) -> Callable[[str], Path]:
    """A bundle of a kind: fp32, w8a8 and int8 with wide heads, or fp32 with narrow ones. Read only."""
    root = tmp_path_factory.mktemp("warm")
    return cache(lambda kind: bundles(MAIN) if kind == "narrow" else export_firm(kind, root))


@pytest.fixture
def copied(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(made(kind), tmp_path / f"{kind}.bundle"))


def opened(path: Path, cache_bytes: int = PLENTY, **options: Any) -> Session:
    return Session.open(path, threads=1, cache_bytes=cache_bytes, **options)


def ids_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 250) for _ in range(count)]


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("kind", "piece"), [("fp32", 7), ("fp32", 256), ("w8a8", 16), ("int8", 7), ("narrow", 7)]
)
def test_the_first_answer_is_bit_for_bit_that_without_a_prefix(
    kind: str, piece: int, loop: str, copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_export.runtime.decode.schedule.PREFILL_CHUNK", piece)
    path, system, taus = copied(kind), ids_of(1, 40), (None, 0.4, 1.0) if loop == "cursor" else (0.5,)
    plain = opened(path, 0)
    [prefix, *_] = make(plain, "system", system, sizes=(piece,))
    is_firm = plain.backend.firm_slots is not None
    assert prefix.length == (40 if is_firm else 35)
    assert (prefix.piece is None) == is_firm
    for tau in taus:
        with quiet():
            session = opened(path)
        for seed, cut in ((2, 40), (3, 40), (4, 33), (5, 1)):
            prompt = system[:cut] + ids_of(seed, 3 * seed)
            config = GenerationConfig(tau=tau, max_new_tokens=9, eos_ids=())
            had = session.generate(prompt, config, commit=LOOPS[loop])
            wanted = plain.generate(prompt, config, commit=LOOPS[loop])
            assert (had.token_ids, had.confidences) == (wanted.token_ids, wanted.confidences)
            # What a firm hit leaves to the end of a piece is two tokens at least.
            due = cut if is_firm else cut // piece * piece
            assert due - 2 <= had.stats.cached_tokens <= due
        assert session.prefix_stats.hits == (4 if is_firm else 3)
        assert session.prefix_stats.stored == 1


def test_every_way_to_ask_begins_with_it(copied: Callable[[str], Path]) -> None:
    path, system = copied("fp32"), ids_of(7, 50)
    make(opened(path, 0), "system", system)
    plain, config = opened(path, 0), GenerationConfig(max_new_tokens=8, eos_ids=())
    prompts = [[*system, *ids_of(i, 9)] for i in range(4)]
    wanted = [plain.generate(prompt, config).token_ids for prompt in prompts]

    def streamed(session: Session) -> Any:
        stream = session.stream(prompts[0], config)
        assert list(stream)
        return [stream.completion]

    def batched(session: Session) -> Any:
        with Batcher(session, Limits(max_rows=2, prefill_tokens=16)) as batcher:
            asked = [batcher.submit(prompt, config) for prompt in prompts]
            return [request.result() for request in asked]

    ways: list[Callable[[Session], Any]] = [
        lambda session: [session.generate(prompts[0], config)],
        streamed,
        lambda session: session.generate_batch(prompts, config),
        lambda session: list(session.generate_each(prompts, config, batch=2)),
        batched,
    ]
    for way in ways:
        done = way(opened(path))
        assert [d.token_ids for d in done] == wanted[: len(done)]
        assert all(d.stats.cached_tokens >= 48 for d in done), "the first request, too"


def test_a_conversation_begins_with_its_system_message(copied: Callable[[str], Path]) -> None:
    path = copied("fp32")
    plain = opened(path, 0)
    ids = Beginning.of_system("be the inner man, and the outer one, and be kind").ids(plain)
    assert plain.text is not None
    assert plain.text.spelled(ids).endswith("and be kind<|im_end|>\n<|im_start|>user\n")
    make(plain, "inner", ids)
    talk = opened(path).conversation(system="be the inner man, and the outer one, and be kind")
    reply = talk.send("the man", GenerationConfig(max_new_tokens=5))
    assert list(reply)
    assert reply.stats.cached_tokens == len(ids)
    assert reply.stats.cached_tokens + reply.prefilled > len(ids)


def test_batches_of_pieces_have_prefixes_of_their_own(copied: Callable[[str], Path]) -> None:
    path, system = copied("int8"), ids_of(3, 40)
    plain = opened(path, 0)
    stored = make(plain, "system", system, sizes=(16, 8))
    assert [(p.piece, p.length) for p in stored] == [(8, 40), (16, 32)]
    config = GenerationConfig(max_new_tokens=6, eos_ids=())
    prompt = [*system, 5, 6, 7]
    for piece, cached in ((8, 40), (16, 32), (9, 0)):
        done = []
        for budget in (PLENTY, 0):
            with Batcher(opened(path, budget), Limits(prefill_tokens=piece)) as batcher:
                done.append(batcher.submit(prompt, config).result())
        assert done[0].stats.cached_tokens == cached
        assert (done[0].token_ids, done[0].confidences) == (done[1].token_ids, done[1].confidences)


def test_every_salt_is_served_and_what_follows_is_its_own(copied: Callable[[str], Path]) -> None:
    path, system = copied("fp32"), ids_of(9, 30)
    make(opened(path, 0), "system", system)
    session, prompt = opened(path), [*system, *ids_of(1, 20)]
    cached = [
        session.generate(prompt, GenerationConfig(max_new_tokens=2, cache_salt=salt)).stats.cached_tokens
        for salt in ("", "a", "b", "a")
    ]
    assert cached == [30, 30, 30, 48]


def test_it_takes_no_room_and_is_not_forgotten(copied: Callable[[str], Path]) -> None:
    path, system = copied("fp32"), ids_of(9, 60)
    make(opened(path, 0), "system", system)
    session = opened(path, 100)
    assert session.generate(system, GenerationConfig(max_new_tokens=2)).stats.cached_tokens == 58
    session.forget_prefixes()
    assert session.generate(system, GenerationConfig(max_new_tokens=2)).stats.cached_tokens == 58
    assert (session.prefix_stats.num_bytes, session.prefix_stats.saved, session.prefix_stats.stored) == (
        0,
        0,
        1,
    )
    assert opened(path, 0).generate(system).stats.cached_tokens == 0


def test_the_file_is_what_the_format_says(copied: Callable[[str], Path]) -> None:
    """Read by the specification alone: ids, zeros to a multiple of 64, keys and values of each layer."""
    path, system = copied("fp32"), ids_of(4, 21)
    session = opened(path, 0)
    [prefix] = make(session, "system", system)
    manifest = open_bundle(path, full=True).manifest
    model, data = manifest.model, (path / prefix.file).read_bytes()
    assert np.frombuffer(data[:84], "<u4").tolist() == system
    assert not any(data[84:128])
    tensors = np.frombuffer(data[128:], "<f4").reshape(
        model.num_layers, 2, model.num_kv_heads, 21, model.head_dim
    )
    wanted = read_entries(session, system, 256)
    for layer in range(model.num_layers):
        for kind in range(2):
            assert np.array_equal(tensors[layer, kind], wanted[2 * layer + kind])
    assert all(np.isfinite(array).all() for array in wanted)
    ids, arrays = read(path, prefix, model)
    assert ids == system
    assert all(np.array_equal(a, b) for a, b in zip(arrays, wanted, strict=True))
    assert manifest.prefixes == (prefix,)
    assert [e.size for e in manifest.files if e.path == prefix.file] == [len(data)]


@pytest.mark.parametrize(("kind", "size"), [("fp32", 256), ("fp32", 3), ("int8", 8)])
def test_what_was_read_behind_is_not_in_it(kind: str, size: int, made: Callable[[str], Path]) -> None:
    """Whatever follows, the same bits: entries of exactly the ids."""
    session, ids = opened(made(kind), 0), ids_of(2, 32)
    whole = read_entries(session, [*ids, *ids_of(5, 16)], size)
    for a, b in zip(read_entries(session, ids, size), whole, strict=True):
        assert a.shape[1] == 32
        assert np.array_equal(a, b[:, :32])


@pytest.mark.parametrize(("kind", "size"), [("fp32", 256), ("fp32", 7), ("int8", 8)])
def test_nothing_behind_the_cursor_is_stored(
    kind: str, size: int, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN everywhere behind the row's cursor before each copy: what is stored is the same."""
    session, ids = opened(made(kind), 0), ids_of(6, 40)
    wanted, keep, kept = read_entries(session, ids, size), Batch.keep, 0

    def poisoned(self: Batch, place: int) -> None:
        nonlocal kept
        for buffer in self.cache.buffers:  # type: ignore[attr-defined]
            buffer.array[place, :, self.active[place].cursor :] = np.nan
        keep(self, place)
        for buffer in self.cache.buffers:  # type: ignore[attr-defined]
            buffer.array[place, :, self.active[place].cursor :] = 0  # 0 * NaN is NaN, behind a mask too
        kept += 1

    monkeypatch.setattr(Batch, "keep", poisoned)
    for array, other in zip(read_entries(session, ids, size), wanted, strict=True):
        assert np.isfinite(array).all()
        assert np.array_equal(array, other)
    assert kept >= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"variant_sha256": "0" * 64}, "model.onnx is not the one that computed it"),
        ({"weights_sha256": "0" * 64}, "the weights are not those"),
        ({"weights_sha256": None}, "the weights are not those"),
        ({"precision": "int4"}, "its precision is int4, float32 is running"),
        ({"kv_layout": "delta"}, "its kv layout is delta, static is running"),
        ({"accuracy_level": 4}, "its accuracy level is 4, - is running"),
    ],
)
def test_a_stale_one_is_left_out_with_one_warning(
    change: dict[str, Any], reason: str, copied: Callable[[str], Path]
) -> None:
    path, system = copied("fp32"), ids_of(9, 30)
    evidence = {"system": "sys tem.txt", "tools": "t.json"}
    make(opened(path, 0), "good", system[:20], evidence)
    [prefix] = make(opened(path, 0), "old", system, evidence)
    manifest = open_bundle(path).manifest
    others = tuple(p for p in manifest.prefixes if p.name == "good")
    write_manifest(path, replace(manifest, prefixes=(*others, replace(prefix, **change))))
    with pytest.warns(MarsWarning) as said:
        session = opened(path)
    assert len(said) == 1
    text = str(said[0].message)
    assert reason in text
    assert f"mars-export prefix {path} --system 'sys tem.txt' --tools t.json --name old" in text
    assert "`good`" not in text
    assert session.generate(system, GenerationConfig(max_new_tokens=2)).stats.cached_tokens == 20
    [stale] = prefixes.described(path, "old")
    assert reason in stale.state
    assert stale.renewal in text
    with quiet():
        opened(path, 0)


def test_one_for_another_variant_or_device_is_not_meant(copied: Callable[[str], Path]) -> None:
    path, system = copied("fp32"), ids_of(9, 30)
    [prefix] = make(opened(path, 0), "system", system)
    manifest = open_bundle(path).manifest
    twin = replace(manifest.variants[0], name="twin")
    write_manifest(path, replace(manifest, variants=(*manifest.variants, twin)))
    with quiet():
        assert opened(path, variant="twin").prefix_stats.stored == 0
        assert opened(path, variant="model").prefix_stats.stored == 1
    write_manifest(path, replace(manifest, prefixes=(replace(prefix, device="cuda"),)))
    with quiet():
        assert opened(path).prefix_stats.stored == 0


def test_it_goes_where_the_bundle_goes(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path, system = copied("fp32"), ids_of(9, 30)
    make(opened(path, 0), "system", system)
    pack(path, tmp_path / "all.tar")
    unpack(tmp_path / "all.tar", tmp_path / "there")
    assert opened(tmp_path / "there").generate(system).stats.cached_tokens == 28


def test_one_that_goes_while_a_session_uses_it(copied: Callable[[str], Path]) -> None:
    path, system = copied("fp32"), ids_of(9, 30)
    make(opened(path, 0), "system", system)
    session, config = opened(path), GenerationConfig(max_new_tokens=4, eos_ids=())
    wanted = opened(path, 0).generate(system, config).token_ids
    assert prefixes.remove(path, "system") == 1
    assert not list(path.glob("prefix-*"))
    done = session.generate(system, config)
    assert (done.token_ids, done.stats.cached_tokens) == (wanted, 28)


def test_one_that_went_since_the_bundle_was_opened(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, system = copied("fp32"), ids_of(9, 30)
    [prefix] = make(opened(path, 0), "system", system)
    real = Session.__init__

    def late(self: Session, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        if (path / prefix.file).exists():
            prefixes.remove(path, "system")

    monkeypatch.setattr(Session, "__init__", late)
    assert opened(path).prefix_stats.stored == 0
    assert not (path / prefix.file).exists()


def test_the_beginning_of_messages(made: Callable[[str], Path]) -> None:
    session = opened(made("fp32"), 0)
    assert session.text is not None
    talk = [
        {"role": "system", "content": "be the man"},
        {"role": "user", "content": "the inner"},
        {"role": "assistant", "content": "an error"},
    ]
    ids = Beginning.of_json(json.dumps(talk), "talk.json").ids(session)
    for more in ("the", " error", "\n\n", "42", "<b>"):
        prompt = session.encode([*talk, {"role": "user", "content": more}])
        assert prompt[: len(ids)] == ids
    assert session.text.spelled(ids).endswith("an error<|im_end|>\n<|im_start|>user\n")
    asked = Beginning(talk[:2]).ids(session)
    assert asked == session.encode(talk[:2]), "up to the answer"
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    with_tools = Beginning.of_system("be the man", tools).ids(session)
    prompt = session.encode([talk[0], {"role": "user", "content": "x"}], tools=tools)
    assert prompt[: len(with_tools)] == with_tools


def test_what_cannot_be_a_prefix_is_said(made: Callable[[str], Path], copied: Callable[[str], Path]) -> None:
    session = opened(made("fp32"), 0)
    for name in ("", "a b", "../x", ".a", "x" * 65):
        with pytest.raises(SessionError, match="a prefix is named with letters"):
            make(session, name, [1, 2, 3])
    with pytest.raises(SessionError, match="no room for a question"):
        make(session, "long", ids_of(1, session.backend.max_capacity - 1))
    with pytest.raises(SessionError, match="keeps whole pieces of 128 tokens only"):
        make(opened(made("int8"), 0), "short", ids_of(1, 127))
    for text in ("{", "{}", "[1]", "[" * 100_000):
        with pytest.raises(SessionError, match=r"m.json: (not JSON|a list of)"):
            Beginning.of_json(text, "m.json")
    path = copied("fp32")
    session = opened(path, 0)
    manifest = session.bundle.manifest
    other = replace(manifest.variants[0], precision="int8")
    write_manifest(path, replace(manifest, variants=(other,)))
    with pytest.raises(SessionError, match="was changed meanwhile: its precision"):
        make(session, "late", ids_of(1, 9))
    assert not list(path.glob("*prefix-*"))
