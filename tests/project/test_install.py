"""What a command says where its extra is not installed: the pip line, before anything else, and never a
traceback.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.shell import call
from support.tiny import Named
from typer.main import get_command

from mars_export import cli

# Ours that come with the base install, and those that no command may begin without.
BASE = {"inspect", "doctor", "verify", "profiles", "grammar", "pull"}
ABSENT = tuple({name for needs in cli.NEEDS.values() for need in needs for name in need.modules})
RUNNERS = cli.RUN.modules
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from mars_export import cli
cli.main()
"""


def without(blocked: tuple[str, ...], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = f"BLOCKED = {set(blocked)!r}\n{BLOCKER}"
    command = [sys.executable, "-c", code, *arguments]
    return call(*command, cwd=cwd)


@pytest.mark.parametrize("command", cli.NEEDS)
def test_the_extra_is_the_message(command: str, tmp_path: Path) -> None:
    for need in cli.NEEDS[command]:
        blocked = need.modules if need.enough is any else need.modules[-1:]
        done = without(blocked, *command.split(), "no/such/place", "--no-such-option", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert f"pip install 'mars-export[{need.extra}]'" in done.stderr
        assert f"pip install '.[{need.extra}]'" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_all_that_lacks_is_named_at_once(tmp_path: Path) -> None:
    done = without(("torch", "onnx", *RUNNERS), "onnx", cwd=tmp_path)
    assert "pip install 'mars-export[export,cpu]' (or gpu, rtx, trt instead of cpu)" in done.stderr
    assert "torch, onnx; none of onnxruntime, tensorrt, tensorrt_rtx" in done.stderr


@pytest.mark.parametrize("command", [*cli.NEEDS, *sorted(BASE)])
def test_help_answers_all_the_same(command: str, tmp_path: Path) -> None:
    done = without(ABSENT, *command.split(), "--help", cwd=tmp_path)
    assert (done.returncode, "Usage" in done.stdout) == (0, True), done.stderr


def test_the_base_does_what_it_can(tmp_path: Path) -> None:
    done = without(ABSENT, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {f["subject"]: f for f in json.loads(done.stdout)["findings"]}
    assert "mars-export[cpu]" in found["onnxruntime"]["detail"]


def test_the_base_reads_and_writes_bundles(bundles: Named, tmp_path: Path) -> None:
    path = shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")
    archive = Path(shutil.make_archive(str(path), "tar", tmp_path, path.name))
    asked = (
        ["inspect", path], ["verify", path], ["profiles", "list", path],
        ["grammar", path, "--regex", "a+", "--name", "a"],
        ["pull", archive, "-o", tmp_path / "pulled", "--sha256", sha256(archive.read_bytes()).hexdigest()],
    )  # fmt: skip
    assert {words[0] for words in asked} == BASE - {"doctor"}
    for words in asked:
        done = without(ABSENT, *map(str, words), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)


def test_every_command_is_in_the_table_or_needs_nothing() -> None:
    commands = set(get_command(cli.app).commands)  # type: ignore[attr-defined]
    assert commands == BASE | {name.split()[0] for name in cli.NEEDS}, "a new command says what it needs"
    for need in {need for needs in cli.NEEDS.values() for need in needs}:
        assert need.enough(find_spec(name) is not None for name in need.modules), "this test needs all extras"


def test_one_runner_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_is_installed", lambda name: name == "tensorrt_rtx")
    cli.check_installed("generate")
    with pytest.raises(cli.MarsError, match=r"mars-export\[export\]"):
        cli.check_installed("trt")


def test_shells_complete() -> None:
    """As a shell asks: the words so far in the environment, one suggestion a line."""
    asked = {"_MARS_EXPORT_COMPLETE": "complete_bash", "COMP_WORDS": "mars-export gene", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['mars-export']; from mars_export import cli; cli.main()"
    done = call(sys.executable, "-c", code, env=os.environ | asked)
    assert done.stdout.split() == ["generate"], done.stderr
