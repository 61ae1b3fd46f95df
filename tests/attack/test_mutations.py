"""The short form of `make attack`: some hostile bundles of each kind, and a harness that sees what goes
wrong.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attack import __main__ as main
from attack import checkpoints, goods
from attack.mutators import MUTATORS, NASTY, mutate
from support.paths import BUNDLE, ROOT


def attack(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "attack"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_hostile_bundles_end_in_our_errors(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for upto in ("40", "100"):
        done = attack("--trials", upto, "--state", str(state))
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert [line["seed"] for line in lines] == list(range(100)), "it goes on where it stopped"
    assert {line["kind"] for line in lines} == set(MUTATORS)
    assert {line["outcome"] for line in lines} == {"BundleError", "SessionError", "ran"}


def test_hostile_checkpoints_end_in_our_errors(tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = attack("--kind", "checkpoints", "--trials", "120", "--state", str(state))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert {line["kind"].split()[0] for line in lines} == set(goods.FORMS)
    assert {line["kind"].split()[1] for line in lines} == {m.__name__ for m in checkpoints.MUTATORS}
    assert {line["outcome"] for line in lines} == {"CheckpointError", "ExportError", "ran"}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ({"outcome": "ran", "seconds": 0.1, "bytes": 5}, False),
        ({"outcome": "BundleError", "seconds": 6.0, "bytes": 5}, True),
        ({"outcome": "SessionError", "seconds": 0.1, "bytes": 2 << 30}, True),
        ({"outcome": "IndexError: 'x'", "seconds": 0.1, "bytes": 5}, True),
        ({"outcome": "printed: 'EP Error'"}, True),
        ({"outcome": "hang"}, True),
    ],
)
def test_what_counts_as_wrong(line: dict[str, Any], wrong: bool) -> None:
    assert main.is_wrong(line) == wrong


def test_what_was_wrong_is_done_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text('{"seed": 0, "outcome": "hang"}\n{"seed": 1, "outcome": "ran"}\n')
    done = attack("--trials", "2", "--state", str(state))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 bundles" in done.stdout
    assert "0 wrong" in done.stdout
    assert [json.loads(line)["seed"] for line in state.read_text().splitlines()] == [0, 1, 0]


def test_a_process_that_dies_is_seen(tmp_path: Path) -> None:
    done = attack("--trials", "2", "--bundle", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stdout.count("process ended with 1: FileNotFoundError") == 2, "and it names the exception"
    assert "2 process ended with 1; 2 wrong" in done.stdout


def test_a_seed_is_the_same_bundle_whatever_was_made_before_it(tmp_path: Path) -> None:
    """Seeds 1045 and 1084 once put a value into itself: the values to choose from were changed in place."""

    def made(seed: int) -> bytes:
        bundle = Path(shutil.copytree(BUNDLE, tmp_path / "b"))
        mutate(bundle, seed)
        manifest = (bundle / "manifest.json").read_bytes()
        shutil.rmtree(bundle)
        return manifest

    nasty = copy.deepcopy(NASTY)
    assert made(1045) == made(1045)
    assert made(1084) == made(1084)
    assert nasty == NASTY
