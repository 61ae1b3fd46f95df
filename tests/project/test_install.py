"""What a command says where its extra is not installed: the pip line, before anything else, and never a
traceback.
"""

from __future__ import annotations

import json
import os
import shutil
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
# One process for many commands: each begins without its modules, and none comes as far as to import others.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED, results = (), []
sys.meta_path.insert(0, Blocker())
from mars_export import cli
for BLOCKED, words in json.loads(sys.argv[1]):
    sys.argv = ["mars-export", *words]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = cli.main()
        except SystemExit as end:
            code = end.code
    results.append((code or 0, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def without(asked: list[tuple[tuple[str, ...], list[object]]], cwd: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command, all in one process that blocks these modules."""
    words = json.dumps([(blocked, [str(word) for word in command]) for blocked, command in asked])
    done = call(sys.executable, "-c", PROGRAM, words, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def test_the_extra_is_the_message(tmp_path: Path) -> None:
    needed = [(command, need) for command, needs in cli.NEEDS.items() for need in needs]
    asked: list[tuple[tuple[str, ...], list[object]]] = [
        (
            need.modules if need.enough is any else need.modules[-1:],
            [*command.split(), "no/such/place", "--no-such-option"],
        )
        for command, need in needed
    ]
    for (command, need), (code, out, err) in zip(needed, without(asked, tmp_path), strict=True):
        assert (code, out) == (1, ""), (command, err)
        assert f"pip install 'mars-export[{need.extra}]'" in err
        assert f"pip install '.[{need.extra}]'" in err
    assert list(tmp_path.iterdir()) == []


def test_all_that_lacks_is_named_at_once(tmp_path: Path) -> None:
    [(_, _, err)] = without([(("torch", "onnx", *RUNNERS), ["onnx"])], tmp_path)
    assert "pip install 'mars-export[export,cpu]' (or gpu, rtx, trt instead of cpu)" in err
    assert "torch, onnx; none of onnxruntime, tensorrt, tensorrt_rtx" in err


def test_help_answers_all_the_same(tmp_path: Path) -> None:
    commands = [*cli.NEEDS, *sorted(BASE)]
    helps = without([(ABSENT, [*command.split(), "--help"]) for command in commands], tmp_path)
    for command, (code, out, err) in zip(commands, helps, strict=True):
        assert (code, "Usage" in out) == (0, True), (command, err)


def test_the_base_does_what_it_can(bundles: Named, tmp_path: Path) -> None:
    path = shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")
    archive = Path(shutil.make_archive(str(path), "tar", tmp_path, path.name))
    asked: list[list[object]] = [
        ["doctor", "--json"], ["inspect", path], ["verify", path], ["profiles", "list", path],
        ["grammar", path, "--regex", "a+", "--name", "a"],
        ["pull", archive, "-o", tmp_path / "pulled", "--sha256", sha256(archive.read_bytes()).hexdigest()],
    ]  # fmt: skip
    assert {words[0] for words in asked} == BASE
    results = without([(ABSENT, words) for words in asked], tmp_path)
    for words, (code, _, err) in zip(asked, results, strict=True):
        assert code == 0, (words, err)
    found = {f["subject"]: f for f in json.loads(results[0][1])["findings"]}
    assert "mars-export[cpu]" in found["onnxruntime"]["detail"]


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
