"""MiMo checkpoints: a stock Qwen2 whose MTP layer proposes tokens in the same forward (docs/decoding.md). The
text is the stock model's, and the draft tokens are those of the layer as transformers computes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import mimo, tiny
from support.agreement import NEW, PROMPTS
from support.shell import run, succeed
from support.twins import SAMPLINGS
from transformers import PreTrainedModel

from mars_export import Batcher, GenerationConfig, Limits, Session
from mars_export.exporter.checkpoint.families import MIMO_MTP
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.option_rules import check_options
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.errors import BundleError, CheckpointError, ExportError, SessionError

LENGTH = 44  # tokens of a fitted text
Open = Callable[..., Session]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, mimo.MtpLayer]:
    directory = tmp_path_factory.mktemp("mimo") / "checkpoint"
    return directory, mimo.write(directory, PROMPTS, LENGTH)


@pytest.fixture(scope="module")
def checkpoint(written: tuple[Path, mimo.MtpLayer]) -> Path:
    return written[0]


@pytest.fixture(scope="module")
def layer(written: tuple[Path, mimo.MtpLayer]) -> mimo.MtpLayer:
    return written[1]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return tiny.load(mimo.TINY, checkpoint)


@pytest.fixture(scope="module")
def opened(checkpoint: Path) -> Open:
    """A session of a bundle with that many draft tokens a step."""

    @cache
    def bundle(drafts: int, *options: str) -> Path:
        target = checkpoint.with_name("-".join(["bundle", str(drafts), *options]))
        succeed("onnx", checkpoint, "-o", target, "--block", str(drafts + 1), *options)
        return target

    def session(drafts: int, *options: str, **settings: Any) -> Session:
        return Session.open(bundle(drafts, *options), threads=1, **({"cache_bytes": 0} | settings))

    return session


def test_it_is_read_as_a_stock_qwen2_with_an_mtp_layer(checkpoint: Path, opened: Open) -> None:
    for name in ("configuration_mimo.py", "modeling_mimo.py"):
        (checkpoint / name).write_text("raise SystemExit('code of the checkpoint was run')\n")
    found = open_checkpoint(str(checkpoint))
    assert (found.dims.model_type, found.dims.mtp, found.block, found.masks) == (
        "qwen2", MIMO_MTP, 2, 0,
    )  # fmt: skip
    assert found.vocabulary.mask_token_id is None
    manifest = opened(2).bundle.manifest
    assert (manifest.block, manifest.masks, manifest.model.mtp_drafts, manifest.model.num_layers) == (
        3,
        0,
        2,
        2,
    )
    assert len(manifest.model.kv_layers) == 3 and manifest.variants[0].drift is not None
    assert manifest.variants[0].drift.reference_library is not None


@pytest.mark.parametrize("masks", ["full", "auto"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_exact_text_is_that_of_the_stock_model_in_fewer_steps(
    drafts: int, masks: Any, opened: Open, model: PreTrainedModel
) -> None:
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks=masks)
    answers = opened(drafts).generate_batch(list(PROMPTS), config)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.token_ids) == mimo.greedy(model, prompt, NEW)
    assert sum(answer.stats.forwards for answer in answers) <= 0.6 * NEW * len(PROMPTS)
    if masks == "full" and drafts > 1:
        assert sum(answer.stats.rejected_draft_tokens for answer in answers) > 10


def test_an_unknown_text_is_the_stock_model_s_although_draft_tokens_are_wrong(
    opened: Open, model: PreTrainedModel
) -> None:
    config = GenerationConfig(max_new_tokens=60, eos_ids=(), masks="full")
    answer = opened(3).generate([200, 13, 150], config)
    assert list(answer.token_ids) == mimo.greedy(model, [200, 13, 150], 60)
    assert answer.stats.rejected_draft_tokens > 100


@pytest.mark.parametrize("drafts", [1, 3])
def test_draft_tokens_are_those_of_the_layer_after_right_and_wrong_ones(
    drafts: int, opened: Open, layer: mimo.MtpLayer, model: PreTrainedModel
) -> None:
    """Ragged steps on the backend: prompts in two parts, then right, half right and wrong draft tokens."""
    session, texts = opened(drafts), [[*prompt, *mimo.greedy(model, prompt, 12)] for prompt in PROMPTS[:3]]
    lengths = [len(prompt) for prompt in PROMPTS[:3]]
    backend = session.backend
    cache = backend.new_cache(3)
    cache.reserve(64)
    assert cache.capacity % 64 == 0

    def step(first: int, rows: list[list[int]], cursors: list[int], pending: list[int]) -> np.ndarray:
        slots = max(map(len, rows))
        index = [list(range(p - 1, len(row))) for row, p in zip(rows, pending, strict=True)]
        outputs = max(map(len, index))
        arrays = (
            [[*row, *[7] * (slots - len(row))] for row in rows],
            cursors,
            [[*places, *[0] * (outputs - len(places))] for places in index],
        )
        output = backend.step(
            cache, first, StepInput(*(np.array(array, np.int64) for array in arrays)), False
        )
        assert output.token_ids.shape == (len(rows), outputs + drafts) and output.mtp_drafts == drafts
        return output.token_ids[:, -drafts:]

    step(2, [texts[2][:11]], [0], [11])  # a part of a prompt; its last slot's next token is known later
    found = step(0, [texts[0][:3], texts[1][:1], texts[2][11:20]], [0, 0, 11], [3, 1, 9])
    for row, length in enumerate(lengths):
        if row < 2:  # after a part of a prompt, one entry of the layer has the model's own token
            assert found[row].tolist() == layer.drafts(texts[row][: length + 1], drafts)
    pieces = [texts[row][length : length + 4] for row, length in enumerate(lengths)]
    pieces[1][2] = (pieces[1][2] + 1) % 250  # wrong after one right draft token
    pieces[2] = [pieces[2][0], (pieces[2][1] + 1) % 250]  # wrong at once, and a shorter row
    found = step(0, pieces, lengths, [1, 1, 1])
    for row, accepted in ((0, 3), (1, 1)):
        known = texts[row][: lengths[row] + accepted + 2]
        assert found[row].tolist() == layer.drafts(known, drafts)
    cursors = [lengths[row] + accepted + 1 for row, accepted in enumerate((3, 1, 0))]
    found = step(0, [[texts[row][cursor]] for row, cursor in enumerate(cursors)], cursors, [1, 1, 1])
    for row in (0, 1):  # what a wrong draft token left in the layer's entries is overwritten
        assert found[row].tolist() == layer.drafts(texts[row][: cursors[row] + 2], drafts)


@pytest.mark.parametrize("settings", [*SAMPLINGS, {"prompt_lookup": 2}, {"regex": "[a-z ]{4,20}"}], ids=str)
def test_other_settings_keep_the_one_token_text(settings: dict[str, Any], opened: Open) -> None:
    session = opened(3)
    config = GenerationConfig(max_new_tokens=NEW, **settings)
    one = config.with_values(tau=1.0, prompt_lookup=0)
    for prompt in PROMPTS:
        assert session.generate(prompt, config).token_ids == session.generate(prompt, one).token_ids


def test_a_choice_is_followed_and_draft_tokens_help(opened: Open) -> None:
    made = opened(3).generate(PROMPTS[0], GenerationConfig(choice=["the answer", "an answer"]))
    assert made.text in ("the answer", "an answer")


def test_prompts_that_share_a_beginning_share_entries_of_all_layers(
    opened: Open, model: PreTrainedModel
) -> None:
    session = opened(2, cache_bytes=1 << 22)
    shared = [i % 250 for i in range(300)]
    config = GenerationConfig(max_new_tokens=8, eos_ids=())
    for end in ([1], [2, 3], [1]):
        answer = session.generate([*shared, *end], config)
        assert list(answer.token_ids) == mimo.greedy(model, [*shared, *end], 8)
    assert answer.stats.cached_tokens > 0


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16", "w8a8", "w4a8"])
def test_other_precisions_give_their_own_one_token_text(precision: str, opened: Open) -> None:
    session = opened(2, "--precision", precision, "--allow-drift", "--shortlist", "270")
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks="full")
    answers = session.generate_batch(list(PROMPTS), config)
    ones = session.generate_batch(list(PROMPTS), config.with_values(tau=1.0))
    assert [answer.token_ids for answer in answers] == [one.token_ids for one in ones]
    if precision not in ("int4", "w4a8"):  # whose text is not the fitted one
        assert sum(answer.stats.accepted_draft_tokens for answer in answers) > 10


def test_the_context_ends_where_it_should(opened: Open, model: PreTrainedModel) -> None:
    """The last steps have no room for the draft tokens' entries beyond the context."""
    prompt = [i % 200 for i in range(500)]
    answer = opened(3).generate(prompt, GenerationConfig(max_new_tokens=40, eos_ids=(), masks="full"))
    assert answer.finish_reason == "capacity"
    assert list(answer.token_ids) == mimo.greedy(model, prompt, len(answer.token_ids))
    assert len(prompt) + len(answer.token_ids) >= 512


def test_a_batch_of_many_lengths_is_the_stock_model_s(opened: Open, model: PreTrainedModel) -> None:
    prompts = [PROMPTS[i % 5][: 1 + i] for i in range(7)]
    config = GenerationConfig(max_new_tokens=10, eos_ids=(), masks="full")
    with Batcher(opened(2), Limits(max_rows=3, prefill_tokens=4)) as batcher:
        requests = [batcher.submit(prompt, config) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert list(request.result(60).token_ids) == mimo.greedy(model, prompt, 10)


# --- what is refused ---


def test_a_tau_is_refused(opened: Open) -> None:
    with pytest.raises(SessionError, match="without masks"):
        opened(1).generate(PROMPTS[0], GenerationConfig(tau=0.5))


def test_a_running_answer_is_changed_by_the_rules_of_its_start(opened: Open) -> None:
    stream = opened(3).stream(PROMPTS[0], GenerationConfig(max_new_tokens=20, eos_ids=()))
    for change in ({"tau": 0.0}, {"exact": False}):
        with pytest.raises(SessionError, match="without masks"):
            stream.seq.change(**change)
    stream.tau = 1.0
    assert all(len(event.token_ids) <= 1 for event in stream)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fixed": True}, "fixed"),
        ({"kv_layout": "appended"}, "in-place"),
        ({"precision": "bf16"}, "bf16"),
        ({"block": 1}, "--block must be 2 to 4"), ({"block": 5}, "--block must be 2 to 4"),
    ],
)  # fmt: skip
def test_options_are_refused_by_name(options: dict[str, Any], words: str, checkpoint: Path) -> None:
    dims = open_checkpoint(str(checkpoint)).dims
    with pytest.raises(ExportError, match=words):
        check_options(ExportOptions(**({"block": 2} | options)), dims)


def test_auto_is_w8a8_and_tensorrt_needs_the_layer_left_out(
    checkpoint: Path, opened: Open, model: PreTrainedModel, tmp_path: Path
) -> None:
    done = run("onnx", checkpoint, "-o", tmp_path / "auto", "--precision", "auto", "--allow-drift")
    assert done.returncode == 0 and "precision: w8a8" in done.stderr, done.stderr
    for source in (checkpoint, opened(1).bundle.path):
        done = run("trt", source, "-o", tmp_path / "engine", "--dry-run")
        assert done.returncode == 1 and "ONNX Runtime only" in " ".join(done.stderr.split()), done.stderr
    succeed("onnx", checkpoint, "-o", tmp_path / "stock", "--no-masks")
    stock = Session.open(tmp_path / "stock", threads=1)
    assert stock.bundle.manifest.model.mtp_drafts == 0
    made = stock.generate(PROMPTS[0], GenerationConfig(max_new_tokens=NEW, eos_ids=()))
    assert list(made.token_ids) == mimo.greedy(model, PROMPTS[0], NEW)


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": "1"}, {}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": 0}, {}, r"not part of a qwen2 model: model\.mtp_layers\.0\."),
        ({}, {"input_proj.weight": None}, r"missing: model\.mtp_layers\.0\.input_proj\.weight \[64, 128\]"),
        ({}, {"input_proj.weight": (64, 64)}, r"misshapen: model\.mtp_layers\.0\.input_proj\.weight"),
        ({}, {"embed_tokens.weight": (8, 8)}, r"not part of .* model\.mtp_layers\.0\.embed_tokens"),
    ],
)
def test_a_checkpoint_of_another_form_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Any], words: str, checkpoint: Path, tmp_path: Path
) -> None:
    for path in (checkpoint).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = load_file(tmp_path / "model.safetensors")
    for name, shape in tensors.items():
        found.pop(f"{mimo.PREFIX}{name}", None)
        if shape is not None:
            found[f"{mimo.PREFIX}{name}"] = torch.ones(shape)
    save_file(found, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("drafts", "words"), [(0, r"past_key_values\.2"), (2, "confidence, logits, token_ids"), (64, "token_ids")]
)
def test_a_reader_that_expects_other_drafts_refuses_the_graph(
    drafts: int, words: str, opened: Open, tmp_path: Path
) -> None:
    """Another reader may ignore `mtp_drafts`; it must not take the layer's tokens for the model's."""
    bundle = opened(1).bundle
    for path in bundle.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads(bundle.manifest.to_json())
    values["model"]["mtp_drafts"] = drafts
    write_manifest(tmp_path, parse_manifest(json.dumps(values)))
    with pytest.raises(BundleError, match=f"disagree about .*{words}"):
        Session.open(open_bundle(tmp_path).path, threads=1)
