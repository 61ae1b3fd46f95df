"""Bundles with draft adapters: the text is the stock model's as transformers generates it, and draft slots
compute what the oracle of tests/support/gated.py does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support import gated, tiny
from support.families import FAMILIES

from mars_export import Batcher, GenerationConfig, Limits, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.decode.speculation.draft_slots import DraftSlots

BLOCK, NEW = 4, 24
PROMPTS = [[5, 17, 99, 4, 61], [30], [77, 30, 8, 8, 150, 42, 9, 201, 3], [12, 13] * 6]
V = tiny.VOCAB_SIZE
MODELS = tiny.TINIES | FAMILIES


class Gated:
    """A base with adapters `one` and `two`, its bundles and its oracle."""

    def __init__(self, root: Path, name: str) -> None:
        self.made, self.root, self.base = MODELS[name], root, tiny.write(MODELS[name], root / "base")
        self.adapters = {
            "one": gated.write_adapter(self.base, root / "one", self.made),
            "two": gated.write_adapter(self.base, root / "two", self.made, rank=3, alpha=48, seed=1),
        }
        self.oracle = gated.GatedOracle(self.made, self.base, list(self.adapters.values()))
        self.session = cache(lambda *a: Session.open(self.bundle(*a), threads=1))

    def bundle(self, precision: str = "fp32", layout: str = "in-place", ids: str = "mask") -> Path:
        target = self.root / f"{precision}-{layout}-{ids}"
        if target.exists():
            return target
        adapters = {name: str(path) for name, path in self.adapters.items()}
        opened = open_checkpoint(str(self.base), draft_adapters=adapters, draft_ids=ids)
        options = ExportOptions(BLOCK, precision, kv_layout=layout, allow_drift=precision != "fp32")
        export_onnx(opened, target, options)
        return target

    def stock(self, precision: str = "fp32") -> Session:
        target = self.root / f"stock-{precision}"
        if not target.exists():
            opened = open_checkpoint(str(self.base), masks=False)
            export_onnx(opened, target, ExportOptions(BLOCK, precision, allow_drift=True))
        return Session.open(target, threads=1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Gated]:
    return cache(lambda name: Gated(tmp_path_factory.mktemp(f"gated-{name}"), name))


def kv_cache(session: Session) -> Any:
    cache = session.backend.new_cache(1)
    cache.reserve(64)
    return cache


def plan(session: Session, cache: Any, cursor: int, ids: Sequence[int]) -> np.ndarray:
    """Logits [len(ids), vocab] of one step."""
    index = np.arange(len(ids))[None]
    output = session.backend.step(cache, 0, StepInput(np.array([ids]), np.array([cursor]), index), True)
    assert output.logits is not None
    return output.logits[0]


def step(session: Session, ids: Sequence[int]) -> np.ndarray:
    """Logits [len(ids), vocab] of one step on an empty cache."""
    return plan(session, kv_cache(session), 0, ids)


def drafts(session: Session, adapter: int, position: int, count: int) -> list[int]:
    info = session.bundle.manifest.draft
    assert info is not None
    return DraftSlots.of(adapter, V, info.low, info.high).ids(position, count)


@pytest.mark.parametrize("layout", ["in-place", "appended"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3-mixed", "llama-bias", "mistral", "gemma2", "phi3", "olmo2"])
def test_draft_slots_compute_the_adapter_and_all_others_the_stock_model(
    models: Callable[[str], Gated], name: str, layout: str
) -> None:
    model = models(name)
    session = model.session("fp32", layout)
    for adapter in (0, 1):
        for known in (1, 5):
            ids = PROMPTS[0][:known] + drafts(session, adapter, known, 5)
            made, expected = step(session, ids), model.oracle.logits(ids)
            np.testing.assert_allclose(made, expected, atol=2e-4)
            stock = model.oracle.logits([i % V for i in ids])
            np.testing.assert_allclose(made[:known], stock[:known], atol=2e-4)
            assert np.abs(expected[known:] - stock[known:]).max() > 0.1, "the adapter must matter"


@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_the_text_is_the_stock_model_s_by_transformers(models: Callable[[str], Gated], layout: str) -> None:
    model = models("qwen2")
    session = model.session("fp32", layout, "noise")
    expected = [model.oracle.greedy(prompt, NEW) for prompt in PROMPTS]
    for masks in (0, 1, 4, "full", "auto"):
        for prompt_lookup, name in ((0, None), (2, "two")):
            config = GenerationConfig(
                max_new_tokens=NEW, masks=masks, prompt_lookup=prompt_lookup, draft=name
            )
            made = session.generate_batch(PROMPTS, config)
            assert [list(answer.token_ids) for answer in made] == expected
    assert sum(answer.stats.accepted_draft_tokens for answer in made) > 0, "some draft tokens must hold"
    one = session.generate(PROMPTS[0], GenerationConfig(tau=1.0, max_new_tokens=NEW))
    assert list(one.token_ids) == expected[0]


def test_rows_with_different_adapters_share_a_batch_and_their_prefixes(
    models: Callable[[str], Gated],
) -> None:
    model = models("qwen2")
    prompt = [(7 * i) % 250 for i in range(130)]
    expected = model.oracle.greedy(prompt, NEW)
    with Batcher(Session.open(model.bundle(), threads=1), Limits(max_rows=3, prefill_tokens=64)) as batcher:
        for _ in range(2):
            submitted = [
                batcher.submit(prompt, GenerationConfig(max_new_tokens=NEW, draft=name))
                for name in ("one", "two", None)
            ]
            answers = [request.result(60) for request in submitted]
            assert [list(answer.token_ids) for answer in answers] == [expected] * 3
    assert min(answer.stats.cached_tokens for answer in answers) > 0


@pytest.mark.parametrize("settings", [{"temperature": 0.9, "top_k": 3}, {"temperature": 0.7, "top_p": 0.6}])
def test_draws_that_verify_drafts_have_the_stock_model_s_distribution(
    models: Callable[[str], Gated], settings: dict[str, float]
) -> None:
    """The first three tokens of 4,000 answers, by a chi-square test against transformers' probabilities."""
    model, prompt = models("qwen2"), PROMPTS[0]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*known, token): chance * share
            for known, chance in expected.items()
            for token, share in gated.shares(model.oracle.logits([*prompt, *known])[-1], **settings).items()
        }
    config = GenerationConfig(max_new_tokens=3, eos_ids=(), masks=3, **settings)
    answers = [
        answer
        for first in range(0, 4000, 100)
        for answer in model.session().generate_batch(
            [prompt] * 100, [config.with_values(seed=first + i) for i in range(100)]
        )
    ]
    assert sum(answer.stats.draft_tokens for answer in answers) >= 4000
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    assert counts.keys() <= expected.keys()
    large = [text for text, chance in expected.items() if chance * 4000 >= 5]
    rest = 1 - sum(expected[text] for text in large)
    observed = [counts[text] for text in large] + [4000 - sum(counts[text] for text in large)]
    wanted = [4000 * expected[text] for text in large] + [4000 * max(rest, 1e-9)]
    if wanted[-1] < 5:  # too few for a cell of their own
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    excess = sum((seen - mean) ** 2 / mean for seen, mean in zip(observed, wanted, strict=True))
    half = torch.tensor([(len(wanted) - 1) / 2, excess / 2], dtype=torch.float64)
    assert torch.special.gammaincc(*half).item() > 0.001, "the tail of chi-square's distribution"


@pytest.mark.parametrize("settings", [{"seed": 3}, {"seed": 3, "top_k": 5}, {"seed": 8, "top_p": 0.7}])
def test_sampled_text_does_not_depend_on_drafts(
    models: Callable[[str], Gated], settings: dict[str, Any]
) -> None:
    model = models("qwen2")
    config = GenerationConfig(temperature=0.8, max_new_tokens=NEW, **settings)
    expected = model.stock().generate_batch(PROMPTS, config)
    for name in ("one", "two"):
        made = model.session().generate_batch(PROMPTS, config.with_values(draft=name, masks=4))
        assert [a.token_ids for a in made] == [a.token_ids for a in expected]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_holds_and_its_text_is_the_stock_model_s(
    models: Callable[[str], Gated], temperature: float
) -> None:
    model = models("qwen2")
    config = GenerationConfig(regex="(a|b|the ){3,9}", max_new_tokens=NEW, temperature=temperature)
    expected = model.stock().generate_batch(PROMPTS, config)
    made = model.session().generate_batch(PROMPTS, config.with_values(draft="two"))
    assert [a.text for a in made] == [a.text for a in expected]


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_base_slots_have_the_stock_bundle_s_bits(models: Callable[[str], Gated], precision: str) -> None:
    """Whatever is in draft slots; in w8a8 products do not depend on the number of rows, either."""
    model = models("qwen2")
    session, stock = model.session(precision), model.stock(precision)
    ids = PROMPTS[2]
    alone = step(stock, ids)
    np.testing.assert_array_equal(step(session, ids), alone)
    for adapter, count in ((0, 3), (1, 7)):
        made = step(session, ids + drafts(session, adapter, len(ids), count))[: len(ids)]
        if precision == "w8a8":
            np.testing.assert_array_equal(made, alone)
        else:
            np.testing.assert_allclose(made, alone, atol=1e-4)
    config = GenerationConfig(max_new_tokens=NEW)
    texts = [[a.token_ids for a in s.generate_batch(PROMPTS, config)] for s in (session, stock)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("count", [0, 3, 7])
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_final_kv_entries_are_those_of_one_token_a_step(
    models: Callable[[str], Gated], precision: str, count: int
) -> None:
    """After steps with right and wrong draft tokens and `count` draft slots each."""
    model = models("qwen2")
    session, stock = model.session(precision), model.stock(precision)
    prompt = PROMPTS[2]
    text = [*prompt, *stock.generate(prompt, GenerationConfig(tau=1.0, max_new_tokens=NEW)).token_ids]
    last = len(text) - 1
    alone, drafted = (kv_cache(s) for s in (stock, session))
    for cursor in range(last):
        plan(stock, alone, cursor, text[cursor : cursor + 1])
    cursor, number = 0, 0
    while cursor < last:
        size, number = min(len(prompt) if cursor == 0 else 1 + number % 4, last - cursor), number + 1
        held = text[cursor : cursor + size]
        wrong = [(text[cursor + size] + 1) % 250] * (number % 3)
        after = drafts(session, number % 2, cursor + size + len(wrong), count)
        plan(session, drafted, cursor, [*held, *wrong, *after])
        cursor += size
    for made, expected in zip(drafted.save(0, last), alone.save(0, last), strict=True):
        if precision == "w8a8":
            np.testing.assert_array_equal(made, expected)
        else:
            np.testing.assert_allclose(made, expected, atol=1e-5)


@pytest.mark.parametrize("value", [6e4, np.inf, np.nan])
@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_drafts_that_overflow_in_half_precision_do_not_change_the_stock_text(
    models: Callable[[str], Gated], tmp_path: Path, layout: str, value: float
) -> None:
    source = models("mistral").bundle("fp16", layout)
    target = gated.with_adapter_values(source, tmp_path / "b", value)
    ids = [5, 17, 99, 4]
    expected, made = [], []
    for bundle, logits in ((source, expected), (target, made)):
        session = Session.open(bundle, threads=1)
        cache = kv_cache(session)
        step = plan(session, cache, 0, ids + drafts(session, 0, len(ids), 5))
        logits += [*step[: len(ids)], *plan(session, cache, len(ids), [7])]
    assert not np.isfinite(step[len(ids) :]).all(), "drafts must overflow"
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha_pattern": {"q_proj": 24}, "rank_pattern": {"v_proj": 2}},
        {"use_rslora": True},
        {"target_modules": ["o_proj"]},
        {"target_modules": ["v_proj", "up_proj"]},
    ],
)
def test_scales_ranks_and_subsets_of_modules(tmp_path: Path, settings: dict[str, Any]) -> None:
    made = tiny.TINIES["llama"]
    base = tiny.write(made, tmp_path / "base")
    adapter = gated.write_adapter(base, tmp_path / "adapter", made, **settings)
    opened = open_checkpoint(str(base), draft_adapters={"a": str(adapter)})
    export_onnx(opened, tmp_path / "bundle", ExportOptions(BLOCK))
    session = Session.open(tmp_path / "bundle", threads=1)
    ids = [4, 8, 15, *drafts(session, 0, 3, 4)]
    oracle = gated.GatedOracle(made, base, [adapter])
    np.testing.assert_allclose(step(session, ids), oracle.logits(ids), atol=2e-4)


def test_half_precision_and_appended_graphs_compute_all_slots(models: Callable[[str], Gated]) -> None:
    """CUDA graphs cannot capture shapes that depend on data, and TensorRT 10.3 has opset 18."""
    model = models("qwen2")
    for precision, layout, count in (
        ("fp32", "in-place", 1),
        ("fp16", "in-place", 0),
        ("fp32", "appended", 0),
    ):
        graph = onnx.load(model.bundle(precision, layout) / "model.onnx", load_external_data=False).graph
        assert sum(node.op_type == "NonZero" for node in graph.node) == count
