"""The README's commands and its Python, run as printed, with a tiny checkpoint for `my-checkpoint`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import tomllib
from support.paths import ROOT
from support.shell import call, run
from support.tiny import Named

import mars_export
from mars_export import cli

DEFAULT = "mars-export onnx -o mars.bundle"  # with the default checkpoint
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
TABLE = INSTALL.partition("## Extras by machine")[2].partition("\n## ")[0]


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


def typed(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in this process, which has torch already; a line with a pipe in a shell."""
    if "|" not in command:
        return run(*shlex.split(command)[1:], cwd=cwd)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return call("bash", "-c", command, cwd=cwd, env=os.environ | {"PATH": path}, timeout=300)


def test_commands_and_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if "mars-export " in line]
    commands = [line for line in commands if not line.startswith("mars-export serve")]  # test_serving_docs.py
    commands = [line for line in commands if not line.startswith("uvx")]  # tests/machines/wheels.sh
    assert len(commands) >= 10
    assert any(command.startswith(DEFAULT) for command in commands), "the quick start's first command"
    for command in commands:
        # The default checkpoint is a download; the tiny one in its place is no model that bears rounding.
        done = typed(command.replace(DEFAULT, f"{DEFAULT} my-checkpoint --allow-drift"), place)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    snippets = blocks("python")
    assert len(snippets) >= 2
    with chdir(place):
        for snippet in snippets:
            exec(snippet, {})
    assert capsys.readouterr().out


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make (\S+)`", README + INSTALL))
    assert targets == {"demo", "check", "wheels"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M)


def test_what_is_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = [
        re.findall(r"[\w-]+", words)
        for words in re.findall(r"pip install '[^'\[]*\[([^\]]+)\]'", README + INSTALL)
    ]
    named += [
        line.split("|")[2].strip().strip("`").split(",")
        for line in re.findall(r"^\| .*`.*$", TABLE, flags=re.M)
    ]
    assert len(named) >= 9
    assert {extra for names in named for extra in names} <= extras.keys()
    releases = set(re.findall(r"/download/v(\S+?)/", README + INSTALL))
    assert releases == {mars_export.__version__}


def test_the_table_of_extras_is_the_command_line_s() -> None:
    """Each command stands in the row of every extra that it needs."""
    for command, needs in cli.NEEDS.items():
        rows = [line for line in TABLE.splitlines() if f"`{command}`" in line]
        assert rows, command
        for need in needs:
            if need == cli.RUN:
                continue  # onnxruntime comes with the package
            assert any(need.extra in re.findall(r"\w+", row.split("|")[2]) for row in rows), (command, need)
