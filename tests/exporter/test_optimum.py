"""`optimum-cli export mars`: found by optimum, the same options, the same bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exports import export
from support.fixtures import Named
from support.missing import need
from support.paths import ROOT
from support.shell import Done, run_main
from support.shell import run as run_ours

need("optimum", "optimum")


def run(*arguments: object, cwd: Path | None = None) -> Done:
    from optimum.commands.optimum_cli import main

    return run_main(main, "optimum-cli", "export", *map(str, arguments), cwd=cwd)


def options(text: str) -> set[str]:
    return {word.strip(",.") for word in text.split() if word.startswith("--")}


def test_optimum_lists_it_and_loads_nothing_for_it() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert "Export a MARS checkpoint" in " ".join(done.stdout.split())
    source = (ROOT / "exporter" / "optimum" / "register_mars.py").read_text(encoding="utf-8")
    above = source[: source.index("def run")]
    assert "mars_export" not in above.partition('"""')[2].partition('"""')[2], "imports belong into run"


def test_it_has_every_option_of_the_onnx_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    done, ours = run("mars", "--help"), run_ours("onnx", "--help")
    assert done.returncode == ours.returncode == 0, done.stderr
    assert options(done.stdout) == options(ours.stdout) | {"--model"}
    assert len(options(done.stdout)) > 20


def test_the_bundle_is_the_same_one(checkpoints: Named, tmp_path: Path) -> None:
    export(checkpoints("qwen2"), tmp_path / "ours", block=5)
    forms = {
        "as optimum's others": ("--model", checkpoints("qwen2"), "theirs", "--block", 5),
        "as mars-export": (checkpoints("qwen2"), "-o", "theirs", "--block", 5, "--force"),
    }
    for name, arguments in forms.items():
        done = run("mars", *arguments, cwd=tmp_path)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
        for file in ("model.onnx", "weights.bin", "tokenizer.json", "manifest.json"):
            theirs, ours = ((tmp_path / place / file).read_bytes() for place in ("theirs", "ours"))
            assert theirs == ours, (name, file)


def test_errors_are_ours() -> None:
    done = run("mars", "--model", "nowhere")
    assert done.returncode == 1
    assert "nowhere: not a directory, a .gguf file or a hub id" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
