"""Qwen3.5: recurrent layers whose states lag (exporter/graph/recurrent.py). Exact text is transformers',
however many guesses are wrong, in ragged batches that rows join and leave.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny
from support.exports import export
from support.families import HYBRIDS, compare
from support.oracle import Oracle
from support.shell import succeed
from transformers import PreTrainedModel

from mars_export import Batcher, GenerationConfig, Limits, Session
from mars_export.exporter.check import segments
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import EngineOptions, ExportOptions
from mars_export.exporter.option_rules import check_options
from mars_export.exporter.tensorrt.engines import export_engine
from mars_export.runtime.bundle.manifest import RecurrentInfo, parse_manifest
from mars_export.runtime.bundle.open import write_manifest
from mars_export.runtime.decode.schedule import run
from mars_export.runtime.decode.speculation.drafts import DraftTokens
from mars_export.runtime.device.states import StateRows
from mars_export.runtime.errors import BundleError, CheckpointError, ExportError, SessionError

NEW = 40
Open = Callable[..., Session]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return cache(lambda name: tiny.write(HYBRIDS[name], root / name))


@pytest.fixture(scope="module")
def opened(written: Callable[[str], Path]) -> Open:
    """A session of a bundle with these export options."""

    @cache
    def bundle(name: str, precision: str, kv: str) -> Path:
        target = written(name).with_name(f"{name}-{precision}-{kv}.bundle")
        rounded = {"precision": precision, "kv": kv, "accuracy_level": 0, "allow_drift": precision != "fp32"}
        export(written(name), target, block=6, metrics=True, **rounded)
        return target

    return lambda name="hybrid", precision="fp32", kv="float": Session.open(
        bundle(name, precision, kv), threads=1
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(1, 250) for _ in range(draw.randint(1, 70))] for _ in range(120)]


def greedy(
    model: PreTrainedModel, prompts: Sequence[list[int]], texts: Sequence[Sequence[int]]
) -> list[bool]:
    """Whether each text is the model's greedy one: by one forward over all."""
    whole = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    most = max(map(len, whole))
    with torch.inference_mode():
        logits = model(torch.tensor([ids + [0] * (most - len(ids)) for ids in whole])).logits
        logits[..., tiny.MASK] = -torch.inf
        best = logits.argmax(-1)
    return [
        best[i, len(prompt) - 1 : len(ids) - 1].tolist() == ids[len(prompt) :]
        for i, (prompt, ids) in enumerate(zip(prompts, whole, strict=True))
    ]


class Guesses:
    """Draft tokens from a known text, each wrong with probability 0.3, in place of a lookup."""

    def __init__(self, text: Sequence[int], start: int, seed: int) -> None:
        self.text, self.start, self.draw = text, start, random.Random(seed)

    def propose(self, tokens: Sequence[int], most: int) -> DraftTokens:
        at = len(tokens) - self.start
        known = self.text[at : at + min(most, self.draw.randint(0, 7))]
        ids = [self.draw.randrange(250) if self.draw.random() < 0.3 else token for token in known]
        return DraftTokens(tuple(ids), (0.9,) * len(ids), "prompt_lookup")


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_and_tokens_with_a_tau_are_those_of_transformers(
    name: str, opened: Open, written: Any
) -> None:
    oracle = Oracle(tiny.load(HYBRIDS[name], written(name)), tiny.MASK, 6)
    found = compare(opened(name), oracle, ("cursor",))
    assert 3 < found.spread < 30 and found.logit_error < 1e-3
    assert found.equal == found.answers == 5


@pytest.mark.parametrize("name", HYBRIDS)
def test_exact_text_is_that_of_transformers_in_ragged_batches(
    name: str, opened: Open, written: Any, prompts: list[list[int]]
) -> None:
    session, model = opened(name), tiny.load(HYBRIDS[name], written(name))
    plain = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks=0)
    texts = [list(answer.token_ids) for answer in session.generate_each(prompts, plain)]
    assert all(greedy(model, prompts, texts))
    seqs = []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        # Answers of several lengths: rows end, and others move to their places.
        config = GenerationConfig(max_new_tokens=NEW - 7 * (i % 3), eos_ids=(), masks="auto")
        seqs.append(session.new_sequence(i, prompt, config))
        seqs[-1].prompt_lookup = Guesses(text, len(prompt), i)  # type: ignore[assignment]
    for _ in run(session.schedule(Limits(max_rows=8, prefill_tokens=16)), seqs):
        pass
    for seq, prompt, text in zip(seqs, prompts, texts, strict=True):
        assert seq.tokens[len(prompt) :] == text[: seq.config.max_new_tokens]
    stats = [seq.stats for seq in seqs]
    assert sum(s.tokens for s in stats) > 1.8 * sum(s.forwards for s in stats)
    assert sum(s.rejected_draft_tokens for s in stats) > 1000


def test_a_batcher_goes_on_while_requests_are_cancelled(opened: Open, prompts: list[list[int]]) -> None:
    session, config = opened(), GenerationConfig(max_new_tokens=NEW, eos_ids=(), prompt_lookup=2)
    expected = [answer.token_ids for answer in session.generate_each(prompts[:24], config)]
    with Batcher(session, Limits(max_rows=4, prefill_tokens=32)) as batcher:
        requests = [batcher.submit(prompt, config) for prompt in prompts[:24]]
        for request in requests[1::3]:
            next(iter(request))
            request.cancel()
        for i, request in enumerate(requests):
            if i % 3 != 1:
                assert request.result(60).token_ids == expected[i]


def test_rows_whose_steps_failed_are_used_again(
    opened: Open, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the graph has written their states, for example while the results are copied."""
    session, config = opened(), GenerationConfig(max_new_tokens=NEW, eos_ids=(), prompt_lookup=2)
    expected = [answer.token_ids for answer in session.generate_each(prompts[:40], config)]
    run_graph, draw = session.backend._run, random.Random(1)  # type: ignore[attr-defined]

    def run_or_fail(*inputs: Any) -> Any:
        output = run_graph(*inputs)
        if draw.random() < 0.02:
            raise MemoryError("as if memory were short")
        return output

    monkeypatch.setattr(session.backend, "_run", run_or_fail)
    made: list[tuple[int, ...] | None] = []
    with Batcher(session, Limits(max_rows=3, prefill_tokens=16)) as batcher:
        for request in [batcher.submit(prompt, config) for prompt in prompts[:40]]:
            try:
                made.append(request.result(60).token_ids)
            except SessionError:
                made.append(None)
    assert 5 < made.count(None) < 35
    assert all(ids in (None, text) for ids, text in zip(made, expected, strict=True))


def test_states_that_do_not_fit_in_memory_are_one_clear_error() -> None:
    for size in (2**13, 2**16):  # more than an address space has, and than numpy can express
        with pytest.raises(SessionError, match=r"states of 900 row\(s\) take [0-9]+ MB; run fewer rows"):
            StateRows(RecurrentInfo((0, 1), size, size, size, inputs=1, width=3), 900)


@pytest.mark.parametrize(
    "settings",
    [
        {"regex": "[a-f]{3}(x|yy)[0-9]{2,6}"},
        {"choice": ("alpha", "alphabet", "beta")},
        {"temperature": 0.8, "seed": 5},
    ],
)
def test_grammars_and_sampling_give_the_text_of_one_token_a_step(settings: Any, opened: Open) -> None:
    session, prompt = opened(), list(range(40, 60))
    whole = GenerationConfig(max_new_tokens=NEW, **settings)
    one = session.generate(prompt, whole.with_values(masks=0))
    seq = session.new_sequence(0, prompt, whole.with_values(prompt_lookup=2))
    seq.prompt_lookup = Guesses(one.token_ids, len(prompt), 1)  # type: ignore[assignment]
    for _ in run(session.schedule(Limits()), [seq]):
        pass
    assert tuple(seq.tokens[len(prompt) :]) == one.token_ids
    assert seq.stats.forwards < one.stats.forwards or "choice" in settings


@pytest.mark.parametrize(
    ("precision", "kv", "share"),
    [
        ("w8a8", "float", 0.8),
        ("w8a8", "int8", 0.8),
        ("w4a8", "int8", 0.4),
        ("int8", "float", 0.8),
        ("int4", "float", 0.1),
    ],
)
def test_rounded_weights_keep_predictions_and_the_text_of_one_token_a_step(
    precision: str, kv: str, share: float, opened: Open, prompts: list[list[int]]
) -> None:
    session = opened("hybrid", precision, kv)
    drift = session.variant.drift
    assert drift is not None and drift.argmax_matches > share * drift.positions
    plain = GenerationConfig(max_new_tokens=20, eos_ids=(), masks=0)
    texts = [answer.token_ids for answer in session.generate_each(prompts[:12], plain)]
    seqs = [
        session.new_sequence(i, prompt, plain.with_values(masks="full"))
        for i, prompt in enumerate(prompts[:12])
    ]
    for seq, text in zip(seqs, texts, strict=True):
        seq.prompt_lookup = Guesses(text, len(seq.tokens), seq.index)  # type: ignore[assignment]
    for _ in run(session.schedule(Limits(max_rows=5)), seqs):
        pass
    same = [tuple(seq.tokens[-20:]) == text for seq, text in zip(seqs, texts, strict=True)]
    assert all(same) or precision == "int4"


def test_a_multimodal_checkpoint_is_read_as_its_text_model(written: Any, tmp_path: Path) -> None:
    """As Qwen3_5ForConditionalGeneration is published: other names, a vision tower, an MTP layer."""
    plain, nested = written("hybrid-tied"), tmp_path / "nested"
    tiny.write(HYBRIDS["hybrid-tied"], nested)
    tensors = {
        n.replace("model.", "model.language_model.", 1): t
        for n, t in load_file(plain / "model.safetensors").items()
    }
    others = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(tensors | others, nested / "model.safetensors", {"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    whole["vision_config"] = {"model_type": "qwen3_5_vision"}
    (nested / "config.json").write_text(json.dumps(whole))
    export(nested, tmp_path / "b", block=6)
    export(plain, tmp_path / "a", block=6)
    for file in ("weights.bin", "model.onnx"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_large_model_is_checked_in_segments(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "WHOLE", 0)
    monkeypatch.setattr(segments, "SEGMENT", 0)
    drift = export(written("hybrid-tied"), tmp_path / "b", block=6).variants[0].drift
    assert drift is not None and drift.argmax_matches == drift.positions


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16"},
        {"precision": "bf16"},
        {"precision": "int8", "activations": "fp16"},
        {"kv_layout": "appended"},
        {"fixed": True},
    ],
)
def test_exports_that_recurrent_layers_lack_are_refused(options: Any, written: Any) -> None:
    dims = open_checkpoint(str(written("hybrid"))).dims
    with pytest.raises(ExportError, match="recurrent layers are computed in fp32"):
        check_options(ExportOptions(block=6, **options), dims)


def test_an_engine_is_refused_before_its_options(written: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(written("hybrid")))
    with pytest.raises(ExportError, match="ONNX Runtime's CPU only: mars-export onnx"):
        export_engine(checkpoint, tmp_path / "b", ExportOptions(block=6, precision="fp16"), EngineOptions())


def test_sessions_refuse_what_states_lack(opened: Open) -> None:
    session = opened()
    path = session.bundle.path
    with pytest.raises(SessionError, match="in memory only: leave out prefix_dir"):
        Session.open(path, prefix_dir=path.with_name("prefixes"))
    with pytest.raises(SessionError, match="CPU only"):
        Session.open(path, "cuda")
    with pytest.raises(SessionError, match="cursor commit only"):
        session.generate([1, 2], GenerationConfig(tau=0.5), cache_block=4)
    with pytest.raises(SessionError, match="recurrent layers' states of 8 rows take"):
        Batcher(session, Limits(kv_bytes=1000))


@pytest.mark.parametrize("field", ["heads", "key_dim", "value_dim", "inputs", "width"])
def test_a_manifest_with_other_states_than_the_graphs_is_refused(
    field: str, opened: Open, tmp_path: Path
) -> None:
    bundle = opened().bundle
    shutil.copytree(bundle.path, tmp_path / "b")
    values = json.loads(bundle.manifest.to_json())
    values["model"]["recurrent"][field] += 1
    write_manifest(tmp_path / "b", parse_manifest(json.dumps(values)))
    with pytest.raises(BundleError, match=r"disagree about past_key_values\.0\.(inputs|state)"):
        Session.open(tmp_path / "b")


def test_inspect_names_recurrent_layers(opened: Open) -> None:
    assert (
        "recurrent 3 of 4 layers, 0.1 MB of states per row" in succeed("inspect", opened().bundle.path).stdout
    )


def test_configs_that_the_graph_cannot_express_are_refused(written: Any, tmp_path: Path) -> None:
    directory = tiny.write(HYBRIDS["hybrid"], tmp_path / "c")

    def rotating(share: float) -> dict[str, Any]:
        return {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
        }

    for change, words in (
        ({"layer_types": ["linear_attention"] * 4}, "4 recurrent layers of 4"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"linear_num_value_heads": 3}, "share the value heads equally"),
        ({"linear_num_key_heads": 0}, "`linear_num_key_heads` must be a positive integer"),
        ({"linear_conv_kernel_dim": 2**40}, "`linear_conv_kernel_dim` is .* beyond"),
        ({"full_attention_interval": 0}, "`full_attention_interval` must be a positive integer"),
        (rotating(0.01), "rotate 0 of the 32 numbers of a head"),
        (rotating(2.0), "rotate 64 of the 32 numbers of a head"),
    ):
        values = json.loads((written("hybrid") / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(str(directory))
