"""`mars-export onnx` and `trt`: options reach what they are for, older words still work."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, tiny
from support.tiny import Named
from tokenizers import Tokenizer
from torch.nn import functional as F
from typer.testing import CliRunner

from mars_export.exporter import commands
from mars_export.exporter.check import selfcheck
from mars_export.exporter.commands import app
from mars_export.runtime.bundle.manifest import Manifest, ParityReport, TextDrift
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.errors import CheckpointError, ExportError, MarsWarning


def run(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def exported(checkpoint: Path, target: Path, *words: str) -> Manifest:
    told = run("onnx", str(checkpoint), "-o", str(target), "--block", "4", *words)
    manifest = open_bundle(target).manifest
    assert told == {"bundle": str(target), "manifest": json.loads(manifest.to_json())}
    return manifest


def test_the_second_opinion_can_be_left_out(checkpoints: Named, tmp_path: Path) -> None:
    asked = exported(checkpoints("llama"), tmp_path / "a").variants[0].drift
    alone = exported(checkpoints("llama"), tmp_path / "b", "--no-reference").variants[0].drift
    assert asked is not None and (asked.reference_library or "").startswith("transformers ")
    assert alone is not None and alone.reference_library is None


def test_the_recorded_block_is_the_default_and_another_is_a_warning(
    checkpoints: Named, tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(checkpoints("llama"), tmp_path / "c"))
    tiny.change_config(checkpoint, "tokenizer_config.json", mars_block=6)
    words = ("onnx", str(checkpoint), "--no-reference", "-o")
    assert run(*words, str(tmp_path / "a"))["manifest"]["block"] == 6
    with pytest.warns(MarsWarning, match="block 4: the checkpoint was trained with block 6"):
        assert run(*words, str(tmp_path / "b"), "--block", "4")["manifest"]["block"] == 4
    tiny.change_config(checkpoint, "tokenizer_config.json", mars_block="6")
    with pytest.raises(CheckpointError, match="`mars_block` must be an integer of 1 or more, not '6'"):
        run(*words, str(tmp_path / "d"))


def test_the_precision_of_a_gpu(checkpoints: Named, tmp_path: Path) -> None:
    words = ("--precision", "auto", "--device", "cuda", "--no-reference")
    assert exported(checkpoints("llama"), tmp_path / "a", *words).variants[0].precision == "float16"


@pytest.mark.parametrize(
    ("name", "words", "kv"),
    [("qwen2", (), "int8"), ("qwen2", ("--kv", "float"), "float32"), ("gemma2", (), "float32")],
)
def test_the_kv_entries_of_a_cpu(name: str, words: tuple[str, ...], kv: str, tmp_path: Path) -> None:
    """In 8 bits where `auto` chooses w8a8, unless they are asked for or the model caps attention scores."""
    settings = ("--precision", "auto", "--no-reference", "--allow-drift", "--quantizer", "round")
    source = tiny.write(families.ALL[name], tmp_path / "c")
    variant = exported(source, tmp_path / "b", *settings, *words).variants[0]
    assert (variant.precision, variant.kv_dtype) == ("w8a8", kv)


def test_fixed_graphs_and_groups(checkpoints: Named, tmp_path: Path) -> None:
    sizes = ("--capacity", "64", "--prefill", "8", "--precision", "int8", "--allow-drift")
    manifest = exported(checkpoints("llama"), tmp_path / "b", "--fixed", "--group", "16", *sizes)
    assert [v.slots for v in manifest.variants] == [None, 1, 4, 8, None]
    stored = manifest.variants[0].quantization
    assert stored is not None and stored.group_size == 16


def test_the_codes_that_are_written_are_said(checkpoints: Named, tmp_path: Path) -> None:
    words = ("--block", "4", "--precision", "int4", "--group", "16", "--allow-drift", "--no-reference")
    where = ["onnx", str(checkpoints("llama")), "-o", str(tmp_path / "b"), *words]
    assert "codes: rounded, which costs int4" in CliRunner().invoke(app, where).output


def test_one_table_or_two(tmp_path: Path) -> None:
    spec = tiny.Tiny("untied", "qwen3", {"head_dim": 20})
    tiny.save(tiny.build(spec), tmp_path / "c")
    tiny.change_config(tmp_path / "c", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="--tied or --untied"):
        exported(tmp_path / "c", tmp_path / "b")
    sizes = {}
    for word in ("--tied", "--untied"):
        manifest = exported(tmp_path / "c", tmp_path / f"b{word}", word)
        sizes[word] = next(f.size for f in manifest.files if f.path == "weights.bin")
    assert sizes["--untied"] - sizes["--tied"] >= tiny.VOCAB_SIZE * 48 * 4


def test_another_tokenizer(checkpoints: Named, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path / "words")
    tiny.change_config(tmp_path / "words", "tokenizer_config.json", mask_token="<|im_start|>")
    manifest = exported(checkpoints("llama"), tmp_path / "b", "--tokenizer", str(tmp_path / "words"))
    assert manifest.tokens.mask == tiny.IM_START


@pytest.mark.parametrize(("size", "workspace"), [("512M", 512 << 20), ("4g", 4 << 30)])
def test_what_trt_would_build(size: str, workspace: int, checkpoints: Named, tmp_path: Path) -> None:
    words = ("trt", str(checkpoints("llama")), "-o", str(tmp_path / "b"), "--target", "sm89", "--dry-run")
    sizes = ("--capacity", "64", "--prefill", "16", "--workspace", size)
    outcome = run(*words, "--fixed", "--no-reference", *sizes)
    assert (outcome["bundle"], outcome["plan"]["workspace"]) == (str(tmp_path / "b"), workspace)
    assert not (tmp_path / "b").exists()
    wrong = CliRunner().invoke(app, [*words, "--workspace", f"{size}X"])
    assert (wrong.exit_code, "4194304" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("same", "error", "perplexity", "failed", "warns"),
    [
        (81, 0.5, 21.0, False, False),
        (96, 0.1, 25.1, False, True),
        (72, 0.5, 21.0, True, True),
        (96, 0.9, 21.0, True, True),
    ],
)
def test_the_self_check_is_one_sentence_and_warns_of_real_loss_only(
    same: int, error: float, perplexity: float, failed: bool, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TextDrift(248, 230, perplexity, 20.0)
    commands._print_drift(ParityReport(97, same, 1.5, error, text=text), "w8a8")
    printed = capsys.readouterr()
    assert printed.out.startswith(
        f"self-check {'failed' if failed else 'passed'}: on a page of text, w8a8 predicts the checkpoint's"
        f" next token in 230 of 248 places; perplexity {perplexity}, the checkpoint's 20.0\n"
    )
    bounds = f"short prompts: {same} of 97 next tokens (at least 73), confidence error {error} (at most 0.8)"
    assert (bounds in printed.out) == failed
    assert ("warning: w8a8 loses much of this checkpoint" in printed.err) == warns


def test_the_page_of_text(checkpoints: Named, tmp_path: Path) -> None:
    """Perplexities of a graph and of transformers."""
    drift = exported(checkpoints("llama"), tmp_path / "b").variants[0].drift
    assert drift is not None and drift.text is not None
    model = tiny.load(tiny.TINIES["llama"], checkpoints("llama"))
    tokenizer = Tokenizer.from_file(str(checkpoints("llama") / "tokenizer.json"))
    losses: list[float] = []
    for paragraph in selfcheck.PARAGRAPHS:
        ids = torch.tensor(tokenizer.encode(paragraph).ids[: selfcheck.PARAGRAPH_TOKENS])
        logits = model(ids[None]).logits[0].detach()
        logits[:, tiny.MASK] = -torch.inf
        losses += F.cross_entropy(logits[1:-1], ids[2:], reduction="none").tolist()
    assert drift.text.positions == drift.text.matches == len(losses)
    wanted = pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert drift.text.perplexity == wanted and drift.text.checkpoint_perplexity == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--activations fp16", "--activations: only with --precision int4, int8, w8a8, w4a8"),
        (
            "--group 16 --asymmetric --head int4 --embedding float",
            "--asymmetric, --embedding, --group, --head: only",
        ),
        ("--quantizer gptq --precision fp16", "--quantizer: only with --precision int4, int8, w8a8, w4a8"),
        ("--group 16 --precision w8a8", "--group: only with --precision int4 or int8, or --head int4"),
        ("--batch 2 --capacity 64 --prefill 8", "--batch, --capacity, --prefill: only with --fixed"),
        ("--device cuda", "--device: only with --precision auto"),
    ],
)
def test_options_that_would_do_nothing(words: str, message: str, checkpoints: Named, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        run("onnx", str(checkpoints("llama")), "-o", str(tmp_path / "b"), *words.split())
