"""The fuzzing programs without a fuzzer: their seeds, and calls of the C interface on a real bundle."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.cabi import build
from support.fuzzed import bundle
from support.shell import call

NAMES = ("automaton", "c_api", "http", "manifest", "text", "tokenizer_json")


def program(name: str) -> Path:
    return build() / "fuzz" / f"fuzz-{name}"


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_small_and_some_are_above_4_kib(name: str, tmp_path: Path) -> None:
    subprocess.run([program(name), f"--seeds={tmp_path}"], check=True)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert max(sizes) > 4096
    assert sum(sizes) < 200_000
    # A file is an input, too: how a finding is looked at again.
    files = sorted(tmp_path.iterdir())[:3]
    assert subprocess.run([program(name), "0", *files], check=False).returncode == 0


def test_calls_on_a_real_bundle(tmp_path: Path) -> None:
    path = bundle(tmp_path / "tiny.bundle")
    env = os.environ | {"MARS_FUZZ_BUNDLE": str(path)}
    done = call(program("c_api"), "300", env=env, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "64 seeds and 300 of their kind: nothing found" in done.stdout
    assert not list(tmp_path.glob("*.last"))


def test_every_program_is_fuzzed_by_make() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if line.startswith("FUZZERS ?= ")]
    assert sorted(line.split()[2:]) == list(NAMES)
    sources = Path(__file__).parents[3] / "runtime" / "cpp" / "fuzz"
    assert sorted(file.stem for file in sources.glob("*.cpp") if file.stem != "driver") == list(NAMES)
