"""Every checkpoint means what transformers and peft make of it: the same logits, or a refusal by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support import tiny
from support.exports import export
from support.tiny import Named

from mars_export.exporter.check import reference, reference_library, segments, selfcheck
from mars_export.exporter.checkpoint import adapter
from mars_export.exporter.checkpoint.open import Checkpoint, open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.errors import CheckpointError, ExportError

TOKENS = [5, 80, 17, 200, 33, 91, 4, 150, 61, tiny.MASK, tiny.MASK]
PEFT_WRITES = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ROWS = tiny.VOCAB_SIZE + 1  # of an embedding with one token more


def ours(checkpoint: Checkpoint) -> np.ndarray:
    return reference.logits(checkpoint.dims, checkpoint.tensors, [TOKENS])[0]


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def loaded(name: str, base: Path, rows: int | None = None) -> Any:
    model = tiny.load(tiny.TINIES[name], base)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def train(
    base: Path,
    name: str,
    directory: Path,
    rows: int | None = None,
    save: bool | str = "auto",
    **settings: Any,
) -> np.ndarray:
    """Write an adapter with random weights, read it again by peft, and return the logits that peft then
    gives.
    """
    adapted = peft.get_peft_model(loaded(name, base, rows), peft.LoraConfig(**(PEFT_WRITES | settings)))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if rows is not None and "embed_tokens" in parameter_name and "lora" not in parameter_name:
                parameter[tiny.VOCAB_SIZE :].normal_()  # the new row is trained in any case
            if parameter.requires_grad:
                step = 0.2 * torch.randn_like(parameter)
                parameter.copy_(step if "lora_" in parameter_name else parameter + step)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(directory, save_embedding_layers=save)
    return logits(peft.PeftModel.from_pretrained(loaded(name, base, rows), str(directory)).eval())


HEAD, EMBEDDING = ["lm_head"], ["embed_tokens"]
CASES: dict[str, tuple[bool, dict[str, Any]]] = {  # is it still tied, if the base is
    "rslora": (True, {"use_rslora": True}),
    "patterns": (
        True,
        {
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7},
            "alpha_pattern": {"q_proj": 11, "layers.0.mlp.down_proj": 3},
        },
    ),
    "some layers": (True, {"layers_to_transform": [1]}),
    "mask row": (True, {"trainable_token_indices": [tiny.MASK]}),
    "mask row by name": (True, {"trainable_token_indices": {"embed_tokens": [tiny.MASK, 7]}}),
    "a whole norm": (True, {"modules_to_save": ["norm"]}),
    "head trained whole": (False, {"modules_to_save": HEAD}),
    "embedding trained whole": (False, {"modules_to_save": EMBEDDING}),
    "both trained whole": (False, {"modules_to_save": HEAD + EMBEDDING}),
    "tied on purpose": (True, {"modules_to_save": EMBEDDING, "ensure_weight_tying": True}),
    "tables saved": (True, {"save": True}),
    "one row more": (True, {"save": True, "rows": ROWS}),
    "one row more, both trained": (False, {"modules_to_save": HEAD + EMBEDDING, "rows": ROWS}),
    "one row more, embedding trained": (False, {"modules_to_save": EMBEDDING, "rows": ROWS}),
    "one row more, tied": (True, {"modules_to_save": EMBEDDING, "rows": ROWS, "ensure_weight_tying": True}),
    "LoRA on the head": (False, {"target_modules": ["q_proj", "lm_head"]}),
    "LoRA on the embedding": (False, {"target_modules": ["q_proj", "embed_tokens"]}),
    "LoRA on both": (False, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "LoRA on both, tied": (True, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
}


@pytest.mark.parametrize("base", ["llama", "a2d-qwen2"])  # tied and untied
@pytest.mark.parametrize("case", CASES)
def test_a_merged_adapter_computes_what_peft_does(
    case: str, base: str, checkpoints: Named, tmp_path: Path
) -> None:
    stays_tied, settings = CASES[case]
    theirs = train(checkpoints(base), base, tmp_path / "adapter", **settings)
    opened = open_checkpoint(str(tmp_path / "adapter"))
    assert opened.dims.tied == (stays_tied and tiny.TINIES[base].tied)
    assert opened.dims.vocab_size == settings.get("rows", tiny.VOCAB_SIZE)
    np.testing.assert_allclose(ours(opened), theirs, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "table"),
    [
        ({"init_lora_weights": "pissa"}, "PLAIN_INITS"),
        ({"init_lora_weights": "olora"}, "PLAIN_INITS"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "UNSUPPORTED"),
    ],
    ids=str,
)
def test_settings_that_change_the_model(
    settings: dict[str, Any], table: str, checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = train(checkpoints("llama"), "llama", tmp_path / "adapter", **settings)
    with pytest.raises(CheckpointError, match=f"{next(iter(settings))}.*merge_and_unload"):
        open_checkpoint(str(tmp_path / "adapter"))
    # What would happen without the refusal: another model, and peft itself says so.
    everything = {"UNSUPPORTED": {}, "PLAIN_INITS": (settings.get("init_lora_weights"),)}
    monkeypatch.setattr(adapter, table, everything[table])
    opened = open_checkpoint(str(tmp_path / "adapter"))
    assert np.abs(ours(opened) - theirs).max() > 1
    with pytest.raises(
        ExportError, match=r"peft \d.* reads this checkpoint in another way: logits differ by"
    ):
        export_onnx(opened, tmp_path / "b", ExportOptions(block=4, allow_drift=True))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_inits_that_only_draw(init: bool | str, checkpoints: Named, tmp_path: Path) -> None:
    theirs = train(checkpoints("llama"), "llama", tmp_path / "adapter", init_lora_weights=init)
    np.testing.assert_allclose(ours(open_checkpoint(str(tmp_path / "adapter"))), theirs, atol=2e-4)


def test_tied_by_the_config_and_untied_by_the_weights(copied: Named) -> None:
    directory = copied("qwen3")
    shutil.rmtree(directory)
    model = tiny.build(tiny.Tiny("untied", "qwen3", {"head_dim": 20}))
    tiny.save(model, directory)
    tiny.change_config(directory, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="transformers 4 takes the embedding.*--tied or --untied"):
        open_checkpoint(str(directory))
    stored = logits(model)
    np.testing.assert_allclose(ours(open_checkpoint(str(directory), tied=False)), stored, atol=2e-4)
    model.lm_head.weight = model.model.embed_tokens.weight
    shared = logits(model)
    np.testing.assert_allclose(ours(open_checkpoint(str(directory), tied=True)), shared, atol=2e-4)


def test_a_head_that_is_a_copy_of_the_embedding_is_tied(copied: Named) -> None:
    directory = copied("llama")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(str(directory)).dims.tied


@pytest.mark.parametrize("declared", ["a2d-qwen2", "a2d-qwen3", "a2d-qwen3-it"])
def test_the_authors_classes_never_window(declared: str, tmp_path: Path) -> None:
    family = declared.split("-")[1]
    windowed = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    tiny.save(tiny.build(tiny.Tiny("w", family, windowed)), tmp_path / "c")
    tiny.change_config(tmp_path / "c", model_type=declared)
    opened = open_checkpoint(str(tmp_path / "c"))
    assert opened.dims.windows == (None, None)
    theirs = tiny.load(tiny.Tiny("w", family), tmp_path / "c")
    for layer in theirs.model.layers:  # as the A2D classes, which hand every layer the same mask
        layer.attention_type = "full_attention"
    theirs.config.layer_types = ["full_attention"] * 2
    np.testing.assert_allclose(ours(opened), logits(theirs), atol=2e-4)
    drift = export_onnx(opened, tmp_path / "b", ExportOptions(block=4)).variants[0].drift
    assert drift is not None and drift.reference_library is not None


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    spec = tiny.Tiny("y", "qwen2", {"max_position_embeddings": 64, "rope_parameters": yarn})
    model = tiny.build(spec)
    tiny.save(model, tmp_path / "c")
    opened = open_checkpoint(str(tmp_path / "c"))
    assert opened.dims.context_length == 256
    tokens = [7 + 11 * i % 240 for i in range(250)]
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(reference.logits(opened.dims, opened.tensors, [tokens])[0], theirs, atol=5e-4)


def test_names_without_their_prefix_are_one_line(checkpoints: Named, tmp_path: Path) -> None:
    model = tiny.load(tiny.TINIES["llama"], checkpoints("llama"))
    model.model.save_pretrained(tmp_path / "c")  # as AutoModel saves it
    tiny.write_tokenizer(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match="names begin with `layers.` where `model.layers.` is exp"
    ) as told:
        open_checkpoint(str(tmp_path / "c"))
    assert "\n" not in str(told.value)


# --- the reference_library itself ---


def test_a_model_that_does_not_fit_is_not_loaded_again(
    checkpoints: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(str(checkpoints("qwen2")))
    needed = 5 * segments.count_weights(opened.tensors.shapes)
    monkeypatch.setattr(reference_library, "_logits", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("mars_export.runtime.machine.available", lambda: needed)
    assert reference_library.compare(opened, TOKENS, np.zeros((len(TOKENS), 288), np.float32)) is None


def test_a_reading_that_transformers_does_not_share(tmp_path: Path, copied: Named) -> None:
    directory = copied("llama")
    opened = open_checkpoint(str(directory))
    tiny.change_config(directory, rms_norm_eps=0.5)  # behind the exporter's back
    with pytest.raises(
        ExportError, match=r"transformers \d.* in another way.*Nothing was written.*report it"
    ):
        export_onnx(opened, tmp_path / "b", ExportOptions(block=4))
    export_onnx(opened, tmp_path / "b", ExportOptions(block=4, reference=False))


def test_what_transformers_cannot_read_is_told(copied: Named, tmp_path: Path) -> None:
    directory = copied("llama")
    opened = open_checkpoint(str(directory))
    (directory / "config.json").write_text("{")
    with pytest.raises(ExportError, match="transformers cannot read this checkpoint .*--no-reference"):
        export_onnx(opened, tmp_path / "b", ExportOptions(block=4))


def test_large_logits_may_err_more(copied: Named, tmp_path: Path) -> None:
    directory = copied("a2d-qwen2")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] *= 3000
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    drift = export(directory, tmp_path / "b", block=4).variants[0].drift
    assert drift is not None
    assert drift.max_logit_error > 1e-2  # refused by a bound that does not know the size
    assert drift.argmax_matches == drift.positions


def spoil_logits(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[np.ndarray], None]) -> None:
    """As if the graph computed something else."""
    exact: Callable[..., Any] = segments.run

    def spoilt(*arguments: Any) -> list[dict[str, np.ndarray]]:
        results = exact(*arguments)
        for result in results:
            spoil(result["logits"])
        return results

    monkeypatch.setattr(selfcheck.segments, "run", spoilt)


@pytest.mark.parametrize(
    ("precision", "place", "is_seen"),
    [("fp32", 0, True), ("w8a8", 0, False), ("w8a8", 1, True), ("int8", 0, False), ("int8", 1, True)],
)
def test_rounded_weights_are_not_judged_by_a_first_token(
    precision: str,
    place: int,
    is_seen: bool,
    checkpoints: Named,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its activations are hundreds of times those of the others, and nobody reads what it alone predicts."""

    def spoil(logits: np.ndarray) -> None:
        logits[place] += 1000

    spoil_logits(monkeypatch, spoil)
    options = ExportOptions(block=4, precision=precision, group=16)
    with pytest.raises(ExportError, match="does not agree") if is_seen else nullcontext():
        export(checkpoints("llama"), tmp_path / "b", options)


@pytest.mark.parametrize("share", [0.08, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_seen(
    value: float, share: float, checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(logits: np.ndarray) -> None:
        logits[: max(1, int(share * len(logits)))] = value

    spoil_logits(monkeypatch, spoil)
    opened = open_checkpoint(str(checkpoints("llama")))
    for precision in ("fp16", "int8"):
        options = ExportOptions(block=4, precision=precision, group=16, allow_drift=True)
        with pytest.raises(ExportError, match=r"gives NaN or Inf for \d+ of \d+ logits. Nothing was written"):
            export_onnx(opened, tmp_path / "b", options)
    assert not list(tmp_path.iterdir())


def test_weights_beyond_what_fp32_can_multiply(copied: Named, tmp_path: Path) -> None:
    directory = copied("a2d-qwen2")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 1e38
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="the checkpoint, computed in fp32, gives NaN or Inf"):
        export(directory, tmp_path / "b", block=4, allow_drift=True)
    assert not (tmp_path / "b").exists()
