"""`optimum-cli export mars`, run as a user runs it: found by optimum, the same options, the same bundle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.fixtures import Named
from support.missing import need
from support.paths import ROOT

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx

need("optimum", "optimum")

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = (sys.executable, "-m", "optimum.commands.optimum_cli", "export")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """optimum-cli with our file where the wheel puts it, if no installed mars-export has put it there."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")])]
    found = find_spec("optimum.commands.register")
    places = (found.submodule_search_locations if found is not None else None) or ()
    if not any((Path(place) / "register_mars.py").exists() for place in places):
        register = tmp_path / "site" / "optimum" / "commands" / "register"
        register.mkdir(parents=True)
        shutil.copy(ROOT / "exporter" / "optimum" / "register_mars.py", register)
        paths.insert(0, str(tmp_path / "site"))

    def started(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return started


def test_optimum_lists_it_and_loads_nothing_for_it(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert "Export a MARS checkpoint" in " ".join(done.stdout.split())
    source = (ROOT / "exporter" / "optimum" / "register_mars.py").read_text(encoding="utf-8")
    above = source[: source.index("def run")]
    assert "mars_export" not in above.partition('"""')[2].partition('"""')[2], "imports belong into run"


def test_it_has_every_option_of_the_onnx_command(run: Run) -> None:
    ours = subprocess.run(
        [sys.executable, "-c", "from mars_export.cli import main; main()", "onnx", "--help"],
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )

    def options(text: str) -> set[str]:
        return {word.strip(",.") for word in text.split() if word.startswith("--")}

    done = run("mars", "--help")
    assert done.returncode == 0, done.stderr
    assert options(done.stdout) == options(ours.stdout) | {"--model"}
    assert len(options(done.stdout)) > 20


def test_the_bundle_is_the_same_one(run: Run, checkpoints: Named, tmp_path: Path) -> None:
    export_onnx(open_checkpoint(str(checkpoints("qwen2"))), tmp_path / "ours", ExportOptions(block=5))
    forms = {
        "as optimum's others": ("--model", checkpoints("qwen2"), "theirs", "--block", 5),
        "as mars-export": (checkpoints("qwen2"), "-o", "theirs", "--block", 5, "--force"),
    }
    for name, arguments in forms.items():
        done = run("mars", *arguments)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
        for file in ("model.onnx", "weights.bin", "tokenizer.json", "manifest.json"):
            found, expected = ((tmp_path / place / file).read_bytes() for place in ("theirs", "ours"))
            assert found == expected, (name, file)


def test_errors_are_ours(run: Run) -> None:
    done = run("mars", "--model", "nowhere")
    assert done.returncode == 1
    assert "nowhere: not a directory, a .gguf file or a hub id" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
