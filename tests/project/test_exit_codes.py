"""Exit codes, over all commands: 2 for a wrong option, argument or prompt, 1 for other errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.shell import run
from support.tiny import Named

from mars_export import cli

BUNDLE, CHECKPOINT, NEW = "BUNDLE", "CHECKPOINT", "NEW"  # paths that the test fills in
ASK = ("generate", BUNDLE, "-p", "hi")
CALIBRATE = ("calibrate", BUNDLE, "-t", "arithmetic", "--no-guarantee")
WRONG = [
    ("generate", BUNDLE),
    ("generate", BUNDLE, "--raw", "-p", ""),
    ("generate", BUNDLE, "-p", "hi", "--raw", "--file", __file__),
    (*ASK, "--n", "2"),
    (*ASK, "--top-p", "2"),
    (*ASK, "--tau", "0.9", "--metric", "luck"),
    (*ASK, "--profile", "none"),
    (*ASK, "--variant", "none"),
    (*ASK, "--device", "abacus"),
    (*ASK, "--grammar", "none"),
    (*ASK, "--choice", "a", "--regex", "b"),
    ("generate", BUNDLE, "-p", "hi " * 2000),
    ("chat", BUNDLE, "--min-p", "3"),
    ("chat", BUNDLE, "--device", "cpu:1"),
    ("serve", BUNDLE, "--max-rows", "0"),
    ("serve", BUNDLE, "--client-share", "2"),
    ("serve", BUNDLE, "--api-key", "a key"),
    ("serve", BUNDLE, BUNDLE),
    ("serve", BUNDLE, "--replicas", "2"),
    ("onnx", CHECKPOINT, "-o", NEW, "--precision", "int3"),
    ("onnx", CHECKPOINT, "-o", NEW, "--block", "99"),
    ("onnx", CHECKPOINT, "-o", NEW, "--group", "16"),
    ("onnx", CHECKPOINT, "-o", NEW, "--device", "cuda"),
    ("onnx", CHECKPOINT, "-o", NEW, "--precision", "w8a8", "--quantizer", "dice"),
    ("trt", CHECKPOINT, "-o", NEW, "--target", "abacus"),
    ("trt", BUNDLE, "--precision", "int3"),
    ("trt", BUNDLE, "--block", "5"),
    (*CALIBRATE, "--max-drop", "2"),
    (*CALIBRATE, "--taus", "0.5,0.9"),
    (*CALIBRATE, "--score", "luck"),
    ("bench", BUNDLE, "--tau", "x"),
    ("bench", BUNDLE, "--batch", "0"),
    ("pull", "./a.bundle.tar", "--revision", "main"),
    ("pull", "me/mine", "--sha256", "0"),
    ("grammar", BUNDLE, "--name", "a"),
    ("grammar", BUNDLE, "--name", "a", "--regex", "("),
]
OTHER = [
    ("generate", NEW, "-p", "hi"),
    ("chat", NEW),
    ("serve", NEW),
    ("onnx", NEW),
    ("onnx", CHECKPOINT, "-o", CHECKPOINT),
    ("trt", NEW),
    ("calibrate", NEW, "-t", "arithmetic"),
    ("calibrate", BUNDLE, "-t", "/nothing.jsonl"),
    ("bench", NEW),
    ("inspect", NEW),
    ("doctor", NEW),
    ("verify", NEW),
    ("pull", "./nothing.bundle.tar"),
    ("profiles", NEW),
    ("profiles", "remove", BUNDLE, "none"),
    ("grammar", NEW, "--name", "a", "--regex", "a"),
    ("grammar", "remove", BUNDLE, "none"),
]


@pytest.mark.parametrize(
    ("words", "code"),
    [(words, 2) for words in WRONG] + [(words, 1) for words in OTHER],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_the_exit_code(
    words: tuple[str, ...], code: int, bundles: Named, checkpoints: Named, tmp_path: Path
) -> None:
    paths = {BUNDLE: bundles("qwen2"), CHECKPOINT: checkpoints("qwen2"), NEW: tmp_path / "new"}
    done = run(*(paths.get(word, word) for word in words), cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert not paths[NEW].exists()
    if words[0] == "generate" and code == 1:
        assert json.loads(run(*(paths.get(w, w) for w in words), "--json").stdout)["error"]["message"]


def test_every_command_is_here() -> None:
    commands = {name for names in cli.PANELS.values() for name in names}
    assert {words[0] for words in OTHER} == commands
    for name in commands:
        assert run(name, "--no-such-option").returncode == 2, name
