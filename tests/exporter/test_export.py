"""Writing a bundle: whole or not at all, and never one that disagrees with its checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.fixtures import Named

from mars_export import Session
from mars_export.exporter.check import reference
from mars_export.exporter.checkpoint.open import Checkpoint, open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.errors import ExportError

OPTIONS = ExportOptions(block=4)


@pytest.fixture
def checkpoint(checkpoints: Named) -> Checkpoint:
    return open_checkpoint(str(checkpoints("llama")))


def test_progress_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    export_onnx(checkpoint, tmp_path / "bundle", OPTIONS, progress=lambda *told: seen.append(told))
    assert {phase for phase, _, _ in seen} == {"weights", "self-check"}
    for phase in ("weights", "self-check"):
        steps = [(done, total) for p, done, total in seen if p == phase]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("phase", ["weights", "self-check"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_export_leaves_nothing(
    phase: str, error: type[BaseException], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def interrupt(told: str, *_: int) -> None:
        if told == phase:
            raise error

    with pytest.raises(error):
        export_onnx(checkpoint, tmp_path / "bundle", OPTIONS, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_no_room_on_the_disk(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000))
    with pytest.raises(ExportError, match=r"MB are needed, 0 MB are free"):
        export_onnx(checkpoint, tmp_path / "bundle", OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "--block must be 1 to 64 for this checkpoint, not 0"),
        ({"block": 65}, "--block must be 1 to 64 for this checkpoint, not 65"),
        ({"fixed": True, "capacity": 513}, r"--capacity must be 8 to 512 \(the .* context\), not 513"),
        ({"fixed": True, "capacity": 9, "prefill": 65, "batch": 0}, "--batch must be .*--prefill must be"),
        ({"precision": "int3"}, "--precision must be one of fp32, .*, int8, w8a8, w4a8, not 'int3'"),
        ({"precision": "int4", "group": 32},
         r"--group 32 does not divide the 48 inputs of q, k, v; .*the 80 inputs of down"),
        ({"precision": "int4", "group": 20}, "--group must be one of 16, 32, 64, 128, 256, not 20"),
        ({"precision": "int4", "group": 16, "head": "int2"},
         "--head must be one of float, int8, int4, not 'int2'"),
        ({"precision": "int4", "group": 16, "embedding": "int4"},
         "--embedding must be one of float, int8, not 'int4'"),
        ({"precision": "int8", "group": 16, "activations": "bf8"},
         "--activations must be one of fp32, fp16, bf16, not 'bf8'"),
        ({"precision": "w8a8", "activations": "fp16"}, "w8a8 is computed with --activations fp32 only"),
        ({"precision": "w8a8", "asymmetric": True, "head": "int4"},
         "--asymmetric is for int4 and int8.*; --head int4 is for"),
        ({"precision": "half", "block": 99}, "--precision must be.*--block must be"),
    ],
)  # fmt: skip
def test_options_out_of_range(
    options: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_onnx(checkpoint, tmp_path / "bundle", ExportOptions(**options))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference_library says something else than the graph."""
    exact = reference.logits

    def moved(*arguments: Any) -> list[np.ndarray]:
        return [
            logits + np.linspace(0, 0.5, logits.shape[-1], dtype=np.float32) for logits in exact(*arguments)
        ]

    monkeypatch.setattr(reference, "logits", moved)


@pytest.mark.usefixtures("drifting")
def test_a_graph_that_drifts_is_not_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError,
        match=r"does not agree with the checkpoint: logit error 0.\d+ \(bound 0.0\d+\).*nothing was written.*"
        r"--allow-drift",
    ):
        export_onnx(checkpoint, tmp_path / "bundle", replace(OPTIONS, reference=False))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("drifting")
def test_a_graph_that_drifts_is_written_when_told_so_and_says_it(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    export_onnx(checkpoint, tmp_path / "bundle", ExportOptions(block=4, allow_drift=True, reference=False))
    drift = open_bundle(tmp_path / "bundle").manifest.variants[0].drift
    assert drift is not None
    assert drift.max_logit_error > 0.3
    Session.open(tmp_path / "bundle", threads=1).generate([1, 2])
