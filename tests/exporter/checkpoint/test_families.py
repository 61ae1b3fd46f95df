"""Every family against transformers: logits, tokens, both KV layouts, every precision, both dialects of
config.json; and who is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import families, tiny
from support.exports import export
from support.families import FAMILIES, LONGROPE, judge
from support.graphs import KEPT, TOKENS, Decoded, forward
from support.missing import need
from support.oracle import Oracle

from mars_export import Session
from mars_export.exporter.check import reference
from mars_export.exporter.check.selfcheck import BOUNDS
from mars_export.exporter.checkpoint import families as table
from mars_export.exporter.checkpoint.dims import check_shapes, dims_from_config
from mars_export.exporter.checkpoint.families import Quirks
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.stock import ALIASES
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.errors import CheckpointError, MarsWarning

ONE_EACH = {made.family: name for name, made in reversed(FAMILIES.items())}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda name: tiny.write(FAMILIES[name], root / name))


APPENDED = ("gemma2", "phi4-mini", "olmo2", "exaone4", "ernie")


def test_every_family_of_the_table_has_a_tiny_checkpoint() -> None:
    assert {made.family for made in families.ALL.values()} == set(table.FAMILIES)


def test_every_quirk_is_turned_by_a_family() -> None:
    """So that the logits of each are compared with transformers' below."""
    turned = {field.name: False for field in fields(Quirks)}
    for made in families.ALL.values():
        quirks = table.FAMILIES[made.family].quirks_of(
            tiny.CLASSES[made.family][0](**tiny.config_values(made))
        )
        for name in turned:
            turned[name] |= getattr(quirks, name) != getattr(Quirks(), name)
    assert all(turned.values()), turned
    assert set(ALIASES.values()) <= table.FAMILIES.keys()


@pytest.mark.parametrize(
    ("name", "kv_layout"),
    [*((name, "in-place") for name in FAMILIES), *((name, "appended") for name in APPENDED)],
)
def test_logits_and_tokens_are_those_of_transformers(name: str, kv_layout: str) -> None:
    found = judge(FAMILIES[name], kv_layout)
    assert 3 < found.spread < 30, "weights large enough to mean something"
    assert found.logit_error < 1e-4
    assert found.equal == found.answers == 10


OPTIONS = ExportOptions(block=6, metrics=True, logits=True, allow_drift=True, accuracy_level=1)
ROUNDED = {
    "fp16": replace(OPTIONS, precision="fp16"),
    "w8a8": replace(OPTIONS, precision="w8a8"),
    "bf16": replace(OPTIONS, precision="bf16", kv_layout="appended"),
}
CODED = {
    "int4": replace(OPTIONS, precision="int4", group=16, asymmetric=True, head="float", embedding="float"),
    "int8, appended": replace(OPTIONS, precision="int8", group=16, kv_layout="appended", head="int4"),
}


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("family", ONE_EACH)
def test_every_rounded_precision_stays_within_its_bounds(
    family: str, precision: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """By the self-check, which runs bfloat16 widened; and fp16 as a session runs it."""
    checkpoint, options = open_checkpoint(str(written(ONE_EACH[family]))), ROUNDED[precision]
    drift = export_onnx(checkpoint, tmp_path / "b", options).variants[0].drift
    assert drift is not None
    logit, _, share = BOUNDS[{"fp16": "float16", "bf16": "bfloat16"}.get(precision, precision)]
    assert 0 < drift.max_logit_error < logit * 30
    assert drift.argmax_matches >= share * drift.positions
    if precision == "fp16":
        found = forward(Session.open(tmp_path / "b", threads=1, cache_bytes=0), TOKENS, (7, 20))[-1]
        exact = reference.logits(checkpoint.dims, checkpoint.tensors, [TOKENS])[0]
        assert np.abs(found - exact)[:, KEPT].max() < logit * float(np.abs(exact).max())


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize("family", ONE_EACH)
def test_every_coded_precision_computes_what_its_codes_stand_for(
    family: str, precision: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint, options = open_checkpoint(str(written(ONE_EACH[family]))), CODED[precision]
    storage = options.quantization
    assert storage is not None
    export_onnx(checkpoint, tmp_path / "b", options)
    session = Session.open(tmp_path / "b", threads=1, cache_bytes=0)
    found = forward(session, TOKENS, (7, 20))[-1]
    apart = replace(checkpoint.dims, tied=False)
    exact = reference.logits(apart, Decoded(checkpoint.tensors, storage), [TOKENS])[0]
    assert np.abs(found - exact)[:, KEPT].max() < 2e-2
    assert np.median(np.abs(found - exact)[:, KEPT]) < 1e-3
    plain = reference.logits(checkpoint.dims, checkpoint.tensors, [TOKENS])[0]
    assert np.abs(plain - exact)[:, KEPT].max() > 0.1, "codes that lose nothing prove nothing"


@pytest.mark.parametrize("name", ["gemma2", "gemma2-mha", "granite", "olmo2", "ernie"])
def test_w8a8_rows_do_not_depend_on_how_many_there_are(
    name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    export(
        written(name), tmp_path / "b", block=6, precision="w8a8", metrics=True, logits=True, allow_drift=True
    )
    session = Session.open(tmp_path / "b", threads=1, cache_bytes=0)
    whole = forward(session, TOKENS, ())[-1]
    single = forward(session, TOKENS, tuple(range(1, len(TOKENS))))[-1]
    np.testing.assert_array_equal(whole, single)


@pytest.mark.parametrize("name", APPENDED)
def test_an_old_opset_needs_no_new_operator(
    name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """What TensorRT of any age reads: the `appended` graph has operators of opset 18 only."""
    export(written(name), tmp_path / "b", block=4, kv_layout="appended")
    model = onnx.load(tmp_path / "b" / "model.onnx", load_external_data=False)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 18)]
    onnx.checker.check_model(str(tmp_path / "b" / "model.onnx"), full_check=True)
    assert not {"Gelu", "RMSNormalization", "RotaryEmbedding", "Attention"} & {
        node.op_type for node in model.graph.node
    }


def test_scores_are_capped_before_they_are_masked_whatever_the_runtime(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """ONNX Runtime 1.25 takes `softcap` behind the mask, and then nothing is masked: no graph uses it."""
    for precision in ("fp32", "w8a8", "fp16"):
        export(written("gemma2"), tmp_path / precision, block=4, precision=precision, allow_drift=True)
        model = onnx.load(tmp_path / precision / "model.onnx", load_external_data=False)
        assert not any(node.op_type == "Attention" for node in model.graph.node)
        assert sum(node.name.endswith("scores_tanh") for node in model.graph.node) == 3


def test_tied_tables_stay_one_table_with_factors(written: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("granite", "gemma3"):
        export(written(name), tmp_path / name, block=4)
        model = onnx.load(tmp_path / name / "model.onnx", load_external_data=False)
        tables = [t.name for t in model.graph.initializer if tuple(t.dims) == (tiny.VOCAB_SIZE, 48)]
        assert tables == ["embed_tokens.weight"]


def test_longrope_is_short_within_the_original_context_and_long_by_choice(tmp_path: Path) -> None:
    settings = {
        "hidden_size": 64,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 32,
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
    }
    made = tiny.Tiny("long", "phi3", settings, seed=1)
    directory = tiny.write(made, tmp_path / "model")
    oracle = Oracle(tiny.load(made, directory), tiny.MASK, 6)
    short = open_checkpoint(str(directory))
    assert short.dims.context_length == 32, "beyond it the model has other frequencies"
    options = ExportOptions(block=6, metrics=True, logits=True)
    export_onnx(short, tmp_path / "short", options)
    session = Session.open(tmp_path / "short", threads=1, cache_bytes=0)
    near = oracle.logits(TOKENS[:32]).numpy()
    assert np.abs(forward(session, TOKENS[:32], (7,))[-1] - near)[:, KEPT].max() < 1e-4
    long = open_checkpoint(str(directory), long_context=True)
    assert long.dims.context_length == 512
    manifest = export_onnx(long, tmp_path / "long", options)
    drift = manifest.variants[0].drift
    assert drift is not None
    assert str(drift.reference_library).startswith("transformers"), (
        "the second opinion takes the long ones, too"
    )
    session = Session.open(tmp_path / "long", threads=1, cache_bytes=0)
    found = forward(session, TOKENS, (7, 33))[-1]
    assert np.abs(found - oracle.logits(TOKENS).numpy())[:, KEPT].max() < 1e-4
    assert np.abs(found[:32] - near)[:, KEPT].max() > 0.1


@pytest.mark.parametrize("family", ONE_EACH)
def test_a_field_left_out_means_what_it_means_to_transformers(family: str) -> None:
    """The sparsest config of each family, down to the shapes of its tensors and the factor of its scores."""
    config_class, model_class = tiny.CLASSES[family]
    sizes = {
        "hidden_size": 320,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 40 if family == "helium" else 32,
        "head_dim": 8,
        "vocab_size": 300,
        "pad_token_id": 0,
    }
    ours, model = dims_from_config(sizes | {"model_type": family}), model_class(config_class(**sizes))
    check_shapes(ours, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    assert ours.attention_scale == pytest.approx(model.model.layers[0].self_attn.scaling)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation `gelu` is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "makes this an encoder"),
        ("granite", {"residual_multiplier": "half"}, "residual_multiplier"),
        ("exaone4", {"layer_types": ["full_attention", "chunked"]}, "layer"),
        ("phi4-mini", {"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "must have length 8"),
        ("ministral3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_would_change_the_model_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = tiny.write(FAMILIES[name], tmp_path / name)
    tiny.change_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("lfm2", "of another kind than Qwen3.5's"),
        ("mixtral", "would read all experts"),
        ("wedlm", "not at contiguous positions"),
        ("bd3lm", "attention in both directions"),
    ],
)
def test_who_is_refused_hears_why(model_type: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=rf"architecture `{model_type}` is not supported: .*{reason}"):
        dims_from_config({"model_type": model_type})


def test_a_name_alone_refuses_no_checkpoint(tmp_path: Path) -> None:
    for name in ("MARS-Qwen2.5-0.5B-BD3LM-blk4", "bd3lm"):
        directory = tiny.write(tiny.TINIES["a2d-qwen2"], tmp_path / name)
        with pytest.warns(MarsWarning, match="attention in both directions"):
            assert open_checkpoint(str(directory)).dims.model_type == "qwen2"


@pytest.mark.parametrize("name", ["phi3", "gemma3", "hunyuan"])
def test_adapters_of_a_family_are_peft_s(name: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    """LoRA on every Linear map, fused ones too: the second opinion compares the merged graph with peft."""
    need("peft", "export")
    import peft

    base = written(name)
    model = peft.get_peft_model(
        tiny.load(FAMILIES[name], base),
        peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False),
    )
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    checkpoint = open_checkpoint(str(tmp_path / "adapter"))
    drift = export_onnx(checkpoint, tmp_path / "b", ExportOptions(block=4)).variants[0].drift
    assert drift is not None
    assert "peft" in str(drift.reference_library)
    plain = open_checkpoint(str(base))
    before, after = (reference.logits(c.dims, c.tensors, [TOKENS])[0] for c in (plain, checkpoint))
    assert np.abs(before - after).max() > 0.1
