"""Building mars-export-kernels where there is no compiler, and what the wheel of libmars is linked with."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from support.missing import lacking
from support.paths import ROOT


def test_without_a_compiler_the_library_is_left_out(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        lacking("cmake is not installed; `make cpp` installs what it needs")
    done = subprocess.run(
        ["cmake", "-S", ROOT / "kernels", "-B", tmp_path],
        env=os.environ | {"CXX": str(tmp_path / "no-compiler")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler: mars-export-kernels is installed without its library" in done.stderr
    assert "mars_export_kernels" not in (tmp_path / "cmake_install.cmake").read_text(encoding="utf-8")


def test_headers_of_the_oldest_onnxruntime() -> None:
    """A newer version of the interface would refuse the older releases that the package allows."""
    header = (ROOT / "kernels/onnxruntime/include/onnxruntime_c_api.h").read_text(encoding="utf-8")
    assert "#define ORT_API_VERSION 21" in header


def test_libmars_is_linked_with_the_symbols_of_gcc_8(tmp_path: Path) -> None:
    for program in ("g++", "readelf"):
        if shutil.which(program) is None:
            lacking(f"{program} is not installed; `make cpp` installs what it needs")
    spec = importlib.util.spec_from_file_location("libstdcxx", ROOT / "runtime/cpp/cmake/libstdcxx.py")
    assert spec is not None and spec.loader is not None
    libstdcxx = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(libstdcxx)
    library = subprocess.run(
        ["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True
    ).stdout.strip()
    libstdcxx.write_stub(Path(library), tmp_path / "stub.s")
    versions = set(re.findall(r"^GLIBCXX_([\d.]+) ", (tmp_path / "stub.map").read_text(), flags=re.M))
    assert max(tuple(map(int, version.split("."))) for version in versions) <= (3, 4, 24)
    code = (tmp_path / "stub.s").read_text().splitlines()
    assert ".globl _ZSt4cout" in code
    # It has a newer version, too; the older one is used.
    assert ".globl _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE" in code
    assert not any("_ZNSt10filesystem12current_pathB5cxx11Ev" in line for line in code)
