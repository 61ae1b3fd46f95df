"""The self-check of a large model: layers run a few at a time say what the whole graph says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from support.fixtures import Named

from mars_export.exporter.check import reference, segments
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.graph.spec import GraphSpec
from mars_export.runtime.bundle.manifest import ParityReport
from mars_export.runtime.bundle.open import open_bundle


def drift_of(checkpoint: Path, target: Path, options: ExportOptions) -> ParityReport:
    export_onnx(open_checkpoint(str(checkpoint)), target, options, force=True)
    drift = open_bundle(target).manifest.variants[0].drift
    assert drift is not None
    return drift


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2", ExportOptions()),
        ("qwen3-mixed", ExportOptions(precision="fp16", metrics=True)),
        ("llama-bias", ExportOptions(precision="w8a8", allow_drift=True)),
        ("qwen2", ExportOptions(precision="int4", group=16, kv_layout="appended", allow_drift=True)),
        ("qwen2", ExportOptions(precision="bf16", kv_layout="appended", allow_drift=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.precision,
)
def test_segments_measure_the_same_drift(
    name: str, options: ExportOptions, checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drift_of(checkpoints(name), tmp_path / "bundle", options)
    monkeypatch.setattr(segments, "WHOLE", 0)
    monkeypatch.setattr(segments, "SEGMENT", 0)
    monkeypatch.setattr(
        segments, "HEAD_PART", 5000
    )  # some blocks of the vocabulary table, the last one shorter
    parts = drift_of(checkpoints(name), tmp_path / "bundle", options)
    assert parts.positions == whole.positions
    # Between segments hidden states are rounded to the graph's precision; one session may not.
    slack = 0 if options.precision == "fp32" else 2
    assert abs(parts.argmax_matches - whole.argmax_matches) <= slack
    assert parts.max_logit_error == pytest.approx(whole.max_logit_error, rel=0.25 * slack, abs=1e-4)
    assert parts.max_confidence_error == pytest.approx(whole.max_confidence_error, rel=0.25 * slack, abs=1e-5)
    assert not (tmp_path / "bundle" / "check.onnx").exists()


def test_every_layer_is_in_one_segment(checkpoints: Named) -> None:
    checkpoint = open_checkpoint(str(checkpoints("qwen2")))
    assert segments.layers_at_once(checkpoint.tensors.shapes) is None  # small: run whole
    assert segments.count_weights({"a": (2, 3), "b": (), "c": (4,)}) == 11


def test_rows_of_different_lengths_do_not_touch_each_other(checkpoints: Named, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(checkpoints("qwen2")))
    options = ExportOptions(logits=True)
    export_onnx(checkpoint, tmp_path / "bundle", options)
    graph = onnx.load(tmp_path / "bundle" / "model.onnx", load_external_data=False)
    spec = GraphSpec(checkpoint.dims, options, checkpoint.vocabulary.mask_token_id)
    sequences = [[5], [7, 8, 9, 10, 11, 12, 13], [3, 4, 5]]

    def logits(given: list[list[int]]) -> list[np.ndarray]:
        return [
            r["logits"]
            for r in segments.run(tmp_path / "bundle" / "check.onnx", graph, spec, 1, ["logits"], 0, given)
        ]

    together = logits(sequences)
    assert [len(rows) for rows in together] == [1, 7, 3]
    for rows, sequence in zip(together, sequences, strict=True):
        np.testing.assert_allclose(rows, logits([sequence])[0], atol=1e-3)
    for rows, exact in zip(
        together, reference.logits(checkpoint.dims, checkpoint.tensors, sequences), strict=True
    ):
        allowed = np.arange(checkpoint.dims.vocab_size) != checkpoint.vocabulary.mask_token_id
        np.testing.assert_allclose(rows[:, allowed], exact[:, allowed], atol=1e-3)
