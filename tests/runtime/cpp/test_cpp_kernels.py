"""libmars has the operators of mars-export-kernels, which w8a8 and w4a8 bundles run on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import tiny
from support.cabi import build
from support.fixtures import Exported
from support.shell import call

from mars_export import GenerationConfig, Session


@pytest.fixture(scope="module", params=["w8a8 float", "w8a8 int8", "w4a8 int8"])
def integer(request: pytest.FixtureRequest, exported: Exported) -> Path:
    """Bundles with KV entries of both types."""
    precision, kv = request.param.split()
    return exported(tiny.WIDE, precision=precision, kv=kv, allow_drift=True)


def answer(bundle: Path, kernels: str | None = None) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "MARS_EXPORT_KERNELS"}
    asked = ("-p", "some words to begin with", "-n", "24", "--tau", "0.3")
    return call(
        build() / "mars-run", bundle, *asked, env=own | ({"MARS_EXPORT_KERNELS": kernels} if kernels else {})
    )


def test_the_text_is_that_of_python_with_every_instruction_set(integer: Path) -> None:
    session = Session.open(integer, threads=1, cache_bytes=0)
    messages = [{"role": "user", "content": "some words to begin with"}]
    done = session.generate(messages, GenerationConfig(max_new_tokens=24, tau=0.3))
    fastest = answer(integer)
    assert fastest.stdout.rstrip("\n") == done.text.rstrip("\n") != "", fastest.stderr
    for other in ("portable", "0"):  # 0 is for Python, whose package it turns off
        assert answer(integer, other).stdout == fastest.stdout


def test_an_instruction_set_that_is_not_here_is_an_error(integer: Path) -> None:
    done = answer(integer, "avx3")
    assert done.returncode == 1
    assert "MARS_EXPORT_KERNELS=avx3 is not an instruction set of this processor" in done.stderr


def test_a_session_in_static_storage_ends_with_the_process(integer: Path) -> None:
    """ONNX Runtime, which is loaded after the session was declared, ends before it."""
    for _ in range(3):
        done = call(build() / "tests" / "mars-static", integer)
        assert done.returncode == 0, done.stderr
