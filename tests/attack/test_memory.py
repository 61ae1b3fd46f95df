"""The short form of benchmarks/attack/memory.py: requests side by side in a process that may take no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attack.memory import kind_of
from support.cabi import build
from support.paths import BUNDLE


def attack(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attack.memory", "--bundle", str(BUNDLE), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_answers_under_a_limit_are_right_or_errors(tmp_path: Path) -> None:
    """22 and 64 ended in ONNX Runtime, by SIGABRT: in a step's arena, and while the library was loaded."""
    state = tmp_path / "state"
    for first, runs in (("0", "4"), ("22", "1"), ("64", "1"), ("96", "4")):
        done = attack("--first", first, "--runs", runs, "--state", str(state))
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1, 2, 3, 22, 64, 96, 97, 98, 99]
    assert not any(line["wrong"] for line in lines), lines
    assert all(sum(line["counts"].values()) >= 1 for line in lines)
    assert "right" not in lines[0]["counts"], "there is no memory at all"
    assert {"right": 32} in [line["counts"] for line in lines]


def test_every_limit_is_met_early_and_late() -> None:
    kinds = {kind_of(seed)[:2] for seed in range(4)}
    assert len(kinds) == 4
    assert kind_of(99)[2] > kind_of(98 - 4)[2] > kind_of(0)[2] == 0


def test_another_answer_is_wrong(tmp_path: Path) -> None:
    """The state of a run with a wrong answer: it fails, and the run is done again."""
    state = tmp_path / "state"
    state.write_text('{"seed": 99, "counts": {"right": 31}, "wrong": ["request 3: another answer"]}\n')
    done = attack("--runs", "0", "--state", str(state))
    assert done.returncode == 1
    assert "1 wrong" in done.stdout
    done = attack("--first", "99", "--runs", "1", "--state", str(state))
    assert done.returncode == 0, done.stdout + done.stderr


def test_libmars_under_a_limit_is_right_or_says_so(tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = attack("--runs", "8", "--runner", "cpp", str(build() / "mars-run"), "--state", str(state))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert [line["limit"] for line in lines] == ["address space", "data"] * 4
    assert [line["counts"] for line in lines[:2]] == [{"errors": 1}] * 2
    assert [line["counts"] for line in lines[-2:]] == [{"right": 1}] * 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill -SEGV $$", "run 0: ended with -11"),
        ("echo terminate called >&2; kill -ABRT $$", "run 0: ended with -6: terminate called"),
        ("echo error: std::bad_alloc >&2; exit 1", "run 0: ended with 1: error: std::bad_alloc"),
        ("echo '{\"token_ids\": [2]}'; exit 0", "run 0: ended with 0"),
    ],
)
def test_a_program_that_falls_is_seen(tmp_path: Path, fault: str, words: str) -> None:
    """One that needs 80 MB of address space."""
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\nmost=$(ulimit -v)\n"
        f"[ $most = unlimited ] || [ $most -gt 80000 ] || {{ {fault}; }}\necho '{{\"token_ids\": [1]}}'\n"
    )
    program.chmod(0o755)
    done = attack("--runs", "2", "--runner", "cpp", str(program))
    assert done.returncode == 1
    assert words in done.stdout
