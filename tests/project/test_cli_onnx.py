"""`mars-export onnx`: what it writes, what it refuses to overwrite, what it says."""

from __future__ import annotations

import json
from pathlib import Path

from support.shell import run, succeed
from support.tiny import Named

from mars_export.runtime.bundle.open import open_bundle


def test_export_then_inspect(checkpoints: Named, tmp_path: Path) -> None:
    done = succeed("onnx", checkpoints("a2d-qwen2"), "-o", tmp_path / "out", "--block", "4", "--json")
    assert "weights ...\nself-check ...\n" in done.stderr, "progress where standard error is a pipe"
    manifest = json.loads(done.stdout)["manifest"]
    assert manifest["block"] == 4
    assert [v["slots"] for v in manifest["variants"]] == [None, None]
    shown = run("inspect", tmp_path / "out")
    assert shown.returncode == 0
    assert "block 4" in shown.stdout
    assert json.loads(run("inspect", tmp_path / "out", "--json").stdout) == manifest


def test_existing_output_is_refused_and_kept(checkpoints: Named, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused = run("onnx", checkpoints("qwen2"), "-o", tmp_path / "mine")
    forced = run("onnx", checkpoints("qwen2"), "-o", tmp_path / "mine", "--force")
    assert (refused.returncode, forced.returncode) == (1, 1)
    assert "exists" in refused.stderr
    assert "not a bundle" in forced.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_bundle_is_not_exported_again(plain: Path, tmp_path: Path) -> None:
    done = run("onnx", plain, "-o", tmp_path / "new")
    assert (done.returncode, (tmp_path / "new").exists()) == (1, False)
    assert "already a bundle" in done.stderr
    assert "mars-export trt" in done.stderr


def test_the_mask_that_was_given_wins_and_that_is_said(checkpoints: Named, tmp_path: Path) -> None:
    arguments = ("onnx", checkpoints("qwen2"), "--block", "4", "--no-reference")
    done = run(*arguments, "-o", tmp_path / "a", "--mask-token", "<|endoftext|>")
    notes = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr
    assert "using <|endoftext|> (id 265) from --mask-token instead of the tokenizer's <|mask|>" in notes
    assert open_bundle(tmp_path / "a").manifest.tokens.mask == 265
    same = run(*arguments, "-o", tmp_path / "b", "--mask-token", "<|mask|>")
    assert (same.returncode, "instead of" in same.stderr) == (0, False)


def test_bf16_is_not_tried_on_the_cpu(checkpoints: Named, tmp_path: Path) -> None:
    words = ("--precision", "bf16", "--block", "4", "--no-reference")
    done = succeed("onnx", checkpoints("qwen2"), "-o", tmp_path / "b", *words)
    told = " ".join(done.stdout.split())
    assert "bf16 runs with TensorRT only; next: mars-export trt" in told and "try:" not in told
