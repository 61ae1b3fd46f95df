"""The choice of a precision: what fits together, and what is chosen for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny
from support.fixtures import Named
from support.shell import run

from mars_export import ExportError, GenerationConfig, Session
from mars_export.exporter import export
from mars_export.exporter.check import selfcheck
from mars_export.exporter.option_rules import choose_precision
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.machine import byte_products


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


@pytest.mark.parametrize(("of", "precision"), [(tiny.WIDE, "w4a8"), (tiny.TINIES["llama"], "w8a8")])
def test_auto_takes_four_bits_where_eight_leave_no_memory(
    of: tiny.Tiny, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the checkpoint can have them: groups of 32 inputs do not divide the other one's."""
    monkeypatch.setattr(export, "available", lambda: 100_000)
    source, target = tiny.write(of, tmp_path / "checkpoint"), tmp_path / "b"
    settings = ("--precision", "auto", "--allow-drift", "--quantizer", "round", "--no-reference")
    done = run("onnx", str(source), "-o", str(target), *settings)
    assert done.returncode == 0, done.stderr
    assert ("precision: w4a8 (w8a8's 0.0 GB are too much for" in done.stderr) == (precision == "w4a8")
    variant = open_bundle(target).manifest.variants[0]
    assert (variant.precision, variant.kv_dtype) == (precision, "int8")


@pytest.mark.parametrize(
    ("heads", "head_dim", "hidden", "inner"), [(3, 6, 45, 77), (1, 2, 33, 1), (5, 10, 50, 31)]
)
def test_auto_takes_any_widths(heads: int, head_dim: int, hidden: int, inner: int, tmp_path: Path) -> None:
    settings = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": head_dim}
    settings |= {"hidden_size": hidden, "intermediate_size": inner}
    checkpoint = tiny.write(tiny.Tiny("odd", "llama", settings), tmp_path / "checkpoint")
    done = run("onnx", str(checkpoint), "-o", str(tmp_path / "b"), "--precision", "auto", "--allow-drift")
    assert done.returncode == 0 and "precision: w8a8 (the fastest on a CPU" in done.stderr, done.stderr
    assert f"byte products here: {byte_products()}" in run("inspect", tmp_path / "b").stdout
    session = Session.open(tmp_path / "b", threads=1)
    exact, one = (session.generate("hi", GenerationConfig(max_new_tokens=8, tau=tau)) for tau in (None, 1.0))
    assert exact.token_ids == one.token_ids
