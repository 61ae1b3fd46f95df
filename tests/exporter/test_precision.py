"""The choice of a precision: what fits together, and what is chosen for a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fixtures import Named
from support.shell import run

from mars_export import ExportError
from mars_export.exporter.check import selfcheck
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, choose_precision, export_onnx
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.machine import byte_products


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "int3"}, "--precision must be one of fp32, fp16, bf16, int4, int8, w8a8, not int3"),
        (
            {"precision": "int4", "group": 32},
            r"--group 32 does not divide the 48 inputs of q, k, v; .*the 80 inputs of down",
        ),
        (
            {"precision": "int4", "group": 20},
            "--group must be one of 16, 32, 64, 128, 256, not 20",
        ),
        (
            {"precision": "int4", "group": 16, "head": "int2"},
            "--head must be one of float, int8, int4, not int2",
        ),
        (
            {"precision": "int4", "group": 16, "embedding": "int4"},
            "--embedding must be float or int8, not int4",
        ),
        (
            {"precision": "int8", "group": 16, "activations": "bf8"},
            "--activations must be one of fp32, fp16, bf16, not bf8",
        ),
        ({"precision": "w8a8", "activations": "fp16"}, "w8a8 is computed with --activations fp32 only"),
        (
            {"precision": "w8a8", "asymmetric": True, "head": "int4"},
            "--asymmetric is for int4 and int8.*; --head int4 is for",
        ),
    ],
)
def test_choices_that_do_not_fit_are_refused_together(
    wrong: dict[str, Any], message: str, checkpoints: Named, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_onnx(
            open_checkpoint(str(checkpoints("llama"))), tmp_path / "b", ExportOptions(block=4, **wrong)
        )
    assert not (tmp_path / "b").exists()


def test_auto_precision_names_its_reason() -> None:
    assert choose_precision()[0] == "w8a8"
    assert choose_precision("cuda")[0] == "fp16"
    with pytest.raises(ExportError, match=r"unknown device `tpu` \(known: cpu, cuda\)"):
        choose_precision("tpu")


@pytest.mark.parametrize(
    ("flags", "kind"),
    [("fpu avx2 avx512_vnni", "vnni"), ("fp asimddp", "dotprod"), ("avx avx2", "avx2"), ("sse", "none")],
)
def test_byte_products_are_read_from_the_flags(flags: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    assert byte_products(tmp_path / "cpuinfo") == kind
    assert byte_products(tmp_path / "absent") == "unknown"


def test_auto_takes_fp32_where_the_first_choice_loses_too_much(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(selfcheck.BOUNDS, "w8a8", (0.0, 0.0, 1.0))
    words = ("onnx", str(checkpoints("llama")), "-o", str(tmp_path / "b"), "--precision")
    assert run(*words, "w8a8").returncode == 1
    done = run(*words, "auto")
    assert done.returncode == 0
    assert "precision: fp32 (the w8a8 graph does not agree with the checkpoint" in done.stderr
    assert open_bundle(tmp_path / "b").manifest.variants[0].precision == "float32"
