"""Exports of what opens: a bundle that opens, or an error and no bundle."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.exports import export
from support.hostile import ATTACKS, SCALARS
from support.tiny import Named

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.errors import CheckpointError, ExportError


def test_an_exit_of_zero_means_a_bundle_that_opens(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from mars_export.exporter import export

    opened = open_checkpoint(str(checkpoints("llama")))
    exact = export.ModelInfo
    monkeypatch.setattr(
        export, "ModelInfo", lambda *known, **more: replace(exact(*known, **more), num_heads=2**20)
    )
    with pytest.raises(ExportError, match="the new bundle does not open: (?s:.)*num_heads"):
        export_onnx(opened, tmp_path / "bundle", ExportOptions(block=4))
    assert not list(tmp_path.iterdir())


def test_what_opens_also_exports_or_says_why(copied: Named, tmp_path: Path) -> None:
    """Mutated configs whose shapes still fit: the bundle opens, or there is none."""
    directory, draw = copied("llama"), random.Random(4)
    original = json.loads((directory / "config.json").read_text())
    fields = ("rms_norm_eps", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id")
    for i in range(max(10, ATTACKS // 10)):
        changes = {draw.choice(fields): draw.choice(SCALARS) for _ in range(2)}
        (directory / "config.json").write_text(json.dumps(original | changes))
        target = tmp_path / f"bundle-{i}"
        try:
            export(directory, target, block=2, reference=False)
        except (CheckpointError, ExportError):
            assert not target.exists()
        else:
            open_bundle(target)
