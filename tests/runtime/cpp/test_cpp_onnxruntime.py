"""libmars loads ONNX Runtime when a graph is opened: which one, and what it says where there is none."""

from __future__ import annotations

import os
import shutil
import sys
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


def test_nothing_is_loaded_from_the_working_directory(bundles: Named, tmp_path: Path) -> None:
    """Not even if libmars was loaded by a relative path, which leads elsewhere now."""
    for folder in ("lib", "elsewhere"):
        (tmp_path / folder).mkdir()
    shutil.copy(build() / "libmars.so", tmp_path / "lib")
    for name in ("libonnxruntime.so.1", "libmars_tensorrt.so"):
        (tmp_path / "elsewhere" / name).write_text("hostile", encoding="utf-8")
    code = (
        "import ctypes, os, sys\n"
        "mars = ctypes.CDLL('./libmars.so')\n"
        "os.chdir('../elsewhere')\n"
        "session, error = ctypes.c_void_p(), ctypes.c_void_p()\n"
        "mars.mars_session_open(sys.argv[1].encode(), None, ctypes.byref(session), ctypes.byref(error))\n"
        "mars.mars_error_message.restype = ctypes.c_char_p\n"
        "sys.exit(mars.mars_error_message(error).decode())"
    )
    env = {name: value for name, value in os.environ.items() if name != "MARS_ONNXRUNTIME"}
    done = call(sys.executable, "-c", code, bundles("llama"), cwd=tmp_path / "lib", env=env)
    assert (done.stderr, done.returncode) == ("\n", 1)  # no error


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
