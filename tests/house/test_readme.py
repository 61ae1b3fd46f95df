"""The README's commands and its Python, run as printed, with a tiny checkpoint for `my-checkpoint`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.tiny import Named

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of one language; "" for those without."""
    return [
        body
        for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.S | re.M)
        if name == language
    ]


@pytest.fixture(scope="module")
def place(checkpoints: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `my-checkpoint` in it, where the shell commands have been run one after the other."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "my-checkpoint").symlink_to(checkpoints("qwen2"))
    return directory


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_commands_and_python(place: Path) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if "mars-export " in line]
    assert len(commands) >= 6
    for command in commands:
        done = shell(command, place)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    snippets = blocks("python")
    assert len(snippets) >= 2
    for snippet in snippets:
        (place / "snippet.py").write_text(snippet)
        done = shell("python snippet.py", place)
        assert done.returncode == 0, done.stderr


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("make ")
    }
    assert targets == {"demo", "check"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M)


def test_file_tree_is_true() -> None:
    (tree,) = (block for block in blocks("") if "cli.py" in block)
    names = [line.split()[0] for line in tree.splitlines() if line and not line.startswith(" ")]
    assert names
    missing = [name for name in names if not (ROOT / name).exists()]
    assert missing == []
