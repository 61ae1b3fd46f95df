"""libmars loads ONNX Runtime when a graph is opened: which one, and what it says where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import onnxruntime
import pytest
from support.cabi import build
from support.fixtures import Named
from support.needed import needed
from support.shell import call

CAPI = Path(onnxruntime.__file__).parent / "capi"


def test_libmars_is_linked_to_no_onnxruntime() -> None:
    assert not [name for name in needed(build() / "libmars.so") if "onnxruntime" in name]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (CAPI, ""),  # a wheel's folder, whose library has a versioned name only
        (next(CAPI.glob("libonnxruntime.so.1*")), ""),
        (
            "/no/such/library.so",
            "ONNX Runtime cannot be loaded: /no/such/library.so: cannot open shared object",
        ),
        (build() / "libmars.so", "has no OrtGetApiBase"),
    ],
)
def test_the_library_that_a_variable_names(place: Path | str, words: str, bundles: Named) -> None:
    env = os.environ | {"MARS_ONNXRUNTIME": str(place)}
    done = call(build() / "mars-run", bundles("llama"), "-p", "hi", "-n", "2", env=env)
    assert (done.returncode, words in done.stderr) == (1 if words else 0, True), done.stderr
