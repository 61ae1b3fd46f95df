"""w4a8 bundles: weights of 4 bits in groups whose scales are integers times the channel's, byte activations,
and integer sums: the same bits for every width of a step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from support import tiny
from support.families import FAMILIES
from support.fixtures import Exported
from support.graphs import KEPT, Decoded, forward

from mars_export import GenerationConfig, Session
from mars_export.exporter.check import reference
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.codes import Quantization
from mars_export.exporter.export import weight_bytes
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph.operators import GROUPED, PRODUCT
from mars_export.exporter.quantize.quantizer import Quantizer
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.errors import ExportError

PROMPT = [(37 * i) % 250 for i in range(23)]
STORAGE = Quantization("w4a8")


def wide(family: str, **settings: object) -> tiny.Tiny:
    """A tiny checkpoint whose maps have multiples of 32 inputs."""
    return tiny.Tiny(family, family, {**tiny.WIDE.settings, **settings}, tied=family.startswith("gemma"))


KINDS = {
    "llama": tiny.WIDE,
    "qwen2": wide("qwen2"),  # with biases
    "qwen3": wide("qwen3", sliding_window=7, use_sliding_window=True, layer_types=tiny.MIXED),
    "gemma3": wide("gemma3_text", query_pre_attn_scalar=20),
    "olmo2": wide("olmo2"),
    "phi4-mini": FAMILIES["phi4-mini"],  # stores q, k and v as one map
}


@pytest.fixture(params=KINDS)
def bundle(request: pytest.FixtureRequest, exported: Exported) -> Path:
    fields = {"metrics": True, "logits": True, "allow_drift": True}
    return exported(KINDS[request.param], precision="w4a8", quantizer="round", **fields)


def test_a_step_computes_what_the_codes_stand_for(bundle: Path) -> None:
    checkpoint = open_checkpoint(str(bundle.parent / "checkpoint"))
    stored, _ = Quantizer("round").prepared(checkpoint, STORAGE, 6, lambda *_: None)

    found = forward(Session.open(bundle, threads=1), PROMPT, ())[-1]
    expected = reference.logits(stored.dims, Decoded(stored.tensors, STORAGE), [PROMPT])[0]
    plain = reference.logits(checkpoint.dims, checkpoint.tensors, [PROMPT])[0]
    by_activations, by_weights = (np.abs(x - expected)[:, KEPT].mean() for x in (found, plain))
    assert by_activations < 0.3 * by_weights


def test_its_size_and_form_are_those_announced(bundle: Path) -> None:
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(bundle / "model.onnx"))
    places = {
        (entries["offset"], entries["length"])
        for tensor in model.graph.initializer
        if (entries := {e.key: e.value for e in tensor.external_data})
    }
    options = ExportOptions(precision="w4a8")
    checkpoint = open_checkpoint(str(bundle.parent / "checkpoint"))
    assert sum(int(length) for _, length in places) == weight_bytes(checkpoint, options)
    kinds = [node.op_type for node in model.graph.node if node.domain]
    layers = checkpoint.dims.num_layers
    assert (kinds.count(GROUPED), kinds.count(PRODUCT)) == (3 * layers, 2 * layers + 1)
    variant = open_bundle(bundle).manifest.variants[0]
    assert variant.is_batch_invariant and variant.quantization is not None
    stored = variant.quantization
    assert (stored.group_size, stored.symmetric, stored.weight_bits, stored.head) == (32, False, 4, "int8")


def test_predictions_do_not_depend_on_the_width_of_a_step(bundle: Path) -> None:
    session = Session.open(bundle, threads=1, cache_bytes=0)
    whole = forward(session, PROMPT, ())[-1]
    for width in (1, 2, 7):
        cuts = tuple(range(width, len(PROMPT), width))
        np.testing.assert_array_equal(forward(session, PROMPT, cuts)[-1], whole)
    config = GenerationConfig(max_new_tokens=30, eos_ids=())
    exact = session.generate(PROMPT, config)
    one_token = session.generate(PROMPT, config.with_values(tau=1.0))
    assert exact.token_ids == one_token.token_ids and exact.stats.draft_tokens


def test_calibrated_codes_are_of_both_widths(exported: Exported) -> None:
    """Codes of 4 and 8 bits are chosen in one pass over the layers, and the graph reads them."""
    made = [
        exported(tiny.WIDE, precision="w4a8", quantizer=quantizer, allow_drift=True, kv="int8")
        for quantizer in ("gptq", "round")
    ]
    sizes = [(path / "weights.bin").stat().st_size for path in made]
    assert sizes[0] == sizes[1]
    assert (made[0] / "weights.bin").read_bytes() != (made[1] / "weights.bin").read_bytes()
    assert Session.open(made[0], threads=1).generate(PROMPT, GenerationConfig(max_new_tokens=5)).token_ids


@pytest.mark.parametrize(
    ("of", "options", "message"),
    [
        ("llama", {}, "groups of 32 inputs do not divide the 48 inputs of q, k, v"),
        (tiny.WIDE, {"asymmetric": True}, "--asymmetric is for int4 and int8"),
        (tiny.WIDE, {"activations": "fp16"}, "w4a8 is computed with --activations fp32 only"),
    ],
)
def test_what_it_does_not_have_is_refused(
    of: str | tiny.Tiny, options: dict[str, object], message: str, exported: Exported
) -> None:
    with pytest.raises(ExportError, match=message):
        exported(of, precision="w4a8", **options)
