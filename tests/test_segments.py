"""The self-check of a large model: layers run a few at a time say what the whole graph says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mars_export.exporter import segments, selfcheck
from mars_export.exporter.checkpoint import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.runtime.bundle import Drift, open_bundle

Named = Callable[[str], Path]


def drift_of(checkpoint: Path, target: Path, options: ExportOptions) -> Drift:
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
        ("qwen2", ExportOptions(precision="int4", quant_block=16, kv_layout="delta", allow_drift=True)),
        ("qwen2", ExportOptions(precision="bf16", kv_layout="delta", allow_drift=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.precision,
)
def test_segments_measure_the_same_drift(
    name: str, options: ExportOptions, checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drift_of(checkpoints(name), tmp_path / "bundle", options)
    monkeypatch.setattr(segments, "WHOLE", 0)
    monkeypatch.setattr(segments, "SEGMENT", 0)
    parts = drift_of(checkpoints(name), tmp_path / "bundle", options)
    assert parts.positions == whole.positions
    # Between segments hidden states are rounded to the graph's precision, where one session may keep them wider.
    slack = 0 if options.precision == "fp32" else 2
    assert abs(parts.argmax_matches - whole.argmax_matches) <= slack
    assert parts.max_logit_error == pytest.approx(whole.max_logit_error, rel=0.25 * slack, abs=1e-4)
    assert parts.max_confidence_error == pytest.approx(whole.max_confidence_error, rel=0.25 * slack, abs=1e-5)
    assert not (tmp_path / "bundle" / "check.onnx").exists()


def test_every_layer_is_in_one_segment(checkpoints: Named) -> None:
    checkpoint = open_checkpoint(str(checkpoints("qwen2")))
    assert selfcheck._layers_at_once(checkpoint) is None  # small: run whole
    assert segments.count_weights({"a": (2, 3), "b": (), "c": (4,)}) == 11
