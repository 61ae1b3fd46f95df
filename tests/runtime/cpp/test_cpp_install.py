"""libmars installed: where it looks for libraries, what it calls itself, and a program built against it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import onnxruntime
import pytest
from support.cabi import build
from support.fixtures import Named
from support.missing import lacking
from support.paths import ROOT
from support.shell import call

VERSION = "0.1"  # of the C++ interface, which may change with every minor version


def run(*command: str | Path) -> str:
    return call(*command, check=True, timeout=300).stdout


def dynamic(file: Path, tag: str) -> list[str]:
    """What a library or program says under `tag`."""
    if shutil.which("readelf") is None:
        lacking("readelf is not installed; `make cpp` installs what it needs")
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-d", file))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mars")
    run("cmake", "--install", build(), "--prefix", made)
    return made


def test_nothing_installed_looks_into_the_source_tree(prefix: Path) -> None:
    (library,) = (path for path in (prefix / "lib").rglob("libmars.so.*") if not path.is_symlink())
    (places,) = dynamic(library, "RUNPATH")
    assert places.split(":")[0] == "$ORIGIN"
    for file in (library, prefix / "bin/mars-run"):
        for place in ":".join(dynamic(file, "RUNPATH")).split(":"):
            assert place.startswith("$ORIGIN") or not Path(place).resolve().is_relative_to(ROOT), place
    for file in prefix.rglob("*.cmake"):
        assert str(ROOT) not in file.read_text(encoding="utf-8"), file
    assert str(ROOT) not in next(prefix.rglob("mars.pc")).read_text(encoding="utf-8")


def test_by_default_it_builds_no_tests_and_warnings_are_no_errors(tmp_path: Path) -> None:
    """A board builds it as it is; its libraries are where the distribution has them."""
    ort = next(
        line.split("=", 1)[1]
        for line in (build() / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("ONNXRuntime_ROOT:")
    )
    words = (f"-DONNXRuntime_ROOT={ort}", "-DCMAKE_INSTALL_LIBDIR=lib/aarch64-linux-gnu")
    run("cmake", "-S", ROOT / "runtime/cpp", "-B", tmp_path, "-G", "Ninja", *words)
    cache = (tmp_path / "CMakeCache.txt").read_text(encoding="utf-8")
    assert "MARS_TESTS:BOOL=OFF" in cache and "MARS_WERROR:BOOL=OFF" in cache
    lines = (tmp_path / "mars.pc").read_text(encoding="utf-8").splitlines()
    prefix = Path("/usr/lib/aarch64-linux-gnu/pkgconfig", lines[0].removeprefix("prefix=${pcfiledir}/"))
    assert os.path.normpath(prefix) == "/usr"
    assert lines[1:3] == ["libdir=${prefix}/lib/aarch64-linux-gnu", "includedir=${prefix}/include"]


def test_its_name_says_the_version_of_its_interface(prefix: Path) -> None:
    library = next((prefix / "lib").rglob("libmars.so"))
    assert dynamic(library, "SONAME") == [f"libmars.so.{VERSION}"]
    assert (library.parent / f"libmars.so.{VERSION}").exists()
    assert (prefix / "include/mars/session.hpp").exists() and not (prefix / "include/mars/row.hpp").exists()


def test_the_installed_command_starts(prefix: Path) -> None:
    assert run(prefix / "bin/mars-run", "--version").startswith(f"mars-run {VERSION}.")


def test_as_a_python_package_it_loads_the_wheel_of_onnxruntime(prefix: Path, tmp_path: Path) -> None:
    package = Path(shutil.copytree(prefix, tmp_path / "mars_export_cpp", symlinks=True))
    for library in (package / "lib").glob("libonnxruntime*"):
        library.unlink()
    wheel = Path(onnxruntime.__file__).resolve().parent
    (tmp_path / "onnxruntime").symlink_to(wheel)
    (library,) = wheel.glob("capi/libonnxruntime.so.1*")
    lines = run(package / "bin/mars-run", "--version").splitlines()
    assert lines[1:] == [f"ONNX Runtime {onnxruntime.__version__}, {library}"]


def test_a_program_finds_it(prefix: Path, bundles: Named, tmp_path: Path) -> None:
    source = ROOT / "examples/cpp_embed"
    run("cmake", "-S", source, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert "tokens/forward" in run(tmp_path / "embed", bundles("llama"), "hi")


@pytest.mark.parametrize("language", ["cpp", "c"])
def test_the_programs_of_the_guide_build_as_it_says(
    prefix: Path, bundles: Named, tmp_path: Path, language: str
) -> None:
    def block(kind: str, page: str = (ROOT / "docs/cpp.md").read_text(encoding="utf-8")) -> str:
        return next(
            text
            for text in re.findall(rf"```{kind}\n(.*?)```", page, re.S)
            if "answer" in text or "int main" in text
        )

    cmake, steps = block("cmake"), block("sh")
    if language == "c":
        cmake = cmake.replace("CXX", "C").replace("answer.cpp", "answer.c")
        steps = steps.replace("c++ -std=c++17 answer.cpp", "cc answer.c")
    (tmp_path / f"answer.{language}").write_text(block(language), encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(cmake, encoding="utf-8")
    (tmp_path / "mars.bundle").symlink_to(bundles("llama"))
    for program in ("build/answer", "./answer"):
        steps = steps.replace(f"{program}\n", f"{program} > {Path(program).parent}/answer.txt\n")
    call("bash", "-ec", steps.replace("/opt/mars", str(prefix)), cwd=tmp_path, check=True, timeout=300)
    answer = (tmp_path / "answer.txt").read_text(encoding="utf-8")
    assert answer.strip() and answer == (tmp_path / "build/answer.txt").read_text(encoding="utf-8")
