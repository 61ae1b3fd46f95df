"""libmars installed: where it looks for libraries, what it calls itself, and a program built against it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.cabi import build
from support.fixtures import Named
from support.missing import lacking
from support.paths import ROOT

VERSION = "0.1"  # of the C++ interface, which may change with every minor version


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


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


def test_its_name_says_the_version_of_its_interface(prefix: Path) -> None:
    library = next((prefix / "lib").rglob("libmars.so"))
    assert dynamic(library, "SONAME") == [f"libmars.so.{VERSION}"]
    assert (library.parent / f"libmars.so.{VERSION}").exists()
    assert (prefix / "include/mars/session.hpp").exists() and not (prefix / "include/mars/row.hpp").exists()


def test_the_installed_command_starts(prefix: Path) -> None:
    assert run(prefix / "bin/mars-run", "--version").startswith(f"mars-run {VERSION}.")


def test_a_program_finds_it(prefix: Path, bundles: Named, tmp_path: Path) -> None:
    source = ROOT / "examples/cpp_embed"
    run("cmake", "-S", source, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert "tokens/forward" in run(tmp_path / "embed", bundles("llama"), "hi")
