"""libmars uses the operator of mars-export-kernels for w8a8 bundles. `make kernels` builds it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.cabi import build
from support.fixtures import Exported, Named
from support.paths import ROOT
from support.shell import call

from mars_export import GenerationConfig, Session

LIBRARY = ROOT / "build" / "kernels" / "mars_export_kernels" / "libmars_export_kernels.so"


@pytest.fixture(scope="module", params=["float", "int8"])
def w8a8(request: pytest.FixtureRequest, exported: Exported) -> Path:
    """Bundles with KV entries of both types."""
    return exported("llama", precision="w8a8", kv=request.param)


def answer(bundle: Path, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "MARS_EXPORT_KERNELS"}
    asked = ("-p", "some words to begin with", "-n", "24", "--tau", "0.3")
    return call(build() / "mars-run", bundle, *asked, env=own | {k: str(v) for k, v in environment.items()})


@pytest.mark.skipif(not LIBRARY.exists(), reason="make kernels has not been run")
@pytest.mark.parametrize("place", [LIBRARY, LIBRARY.parent])
def test_the_text_is_the_same_with_the_operator(w8a8: Path, place: Path) -> None:
    plain, fast = answer(w8a8), answer(w8a8, MARS_KERNELS=place, MARS_EXPORT_KERNELS="portable")
    assert plain.returncode == fast.returncode == 0, plain.stderr + fast.stderr
    assert plain.stdout == fast.stdout != ""


def test_the_text_is_that_of_python(w8a8: Path) -> None:
    session = Session.open(w8a8, threads=1, cache_bytes=0)
    messages = [{"role": "user", "content": "some words to begin with"}]
    done = session.generate(messages, GenerationConfig(max_new_tokens=24, tau=0.3))
    assert answer(w8a8).stdout.rstrip("\n") == done.text.rstrip("\n")


@pytest.mark.skipif(not LIBRARY.exists(), reason="make kernels has not been run")
def test_an_instruction_set_that_is_not_here_is_an_error(w8a8: Path) -> None:
    done = answer(w8a8, MARS_KERNELS=LIBRARY, MARS_EXPORT_KERNELS="avx3")
    assert done.returncode == 1
    assert "MARS_EXPORT_KERNELS=avx3 is not an instruction set of this processor" in done.stderr


def test_a_library_that_does_not_load_is_an_error_unless_it_is_turned_off(w8a8: Path) -> None:
    broken = answer(w8a8, MARS_KERNELS="/no/such/library.so")
    assert broken.returncode == 1
    assert "mars-export-kernels cannot be loaded: /no/such/library.so: cannot open" in broken.stderr
    assert answer(w8a8, MARS_KERNELS="/no/such/library.so", MARS_EXPORT_KERNELS="0").returncode == 0


def test_other_precisions_do_not_need_it(bundles: Named) -> None:
    assert answer(bundles("llama"), MARS_KERNELS="/no/such/library.so").returncode == 0
