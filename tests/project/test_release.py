"""What a release is made of: packages, bundles, checksums, words for a package index, links."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tomllib
from support.missing import lacking, need
from support.paths import ROOT
from support.shell import call

INDEXED = {"description", "readme", "license", "requires-python", "keywords", "classifiers"}
PACKAGES = (
    "pyproject.toml",
    "exporter/default/pyproject.toml",
    "kernels/pyproject.toml",
    "runtime/cpp/pyproject.toml",
)
LINK = re.compile(r"\]\(([\w./#:-]+)\)")


def test_the_source_archive_has_all_that_is_tracked(tmp_path: Path) -> None:
    need("setuptools", "dev")
    listed = call("git", "ls-files", "-z", cwd=ROOT)
    if listed.returncode != 0:
        lacking("this is no git clone")
    tracked = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert len(tracked) > 500
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "sdist", "--formats=tar"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    [file] = (tmp_path / "dist").iterdir()
    with tarfile.open(file) as archive:
        archived = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - archived == set(), "name it in MANIFEST.in"


@pytest.mark.parametrize("file", PACKAGES)
def test_an_index_is_told_what_it_asks(file: str) -> None:
    """`twine check --strict` takes no package without a long description."""
    project = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]
    assert project.keys() >= INDEXED


def test_links_become_absolute(tmp_path: Path) -> None:
    release = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Releasing")[2]
    [line] = [line.strip() for line in release.splitlines() if line.strip().startswith("sed ")]
    shutil.copy(ROOT / "README.md", tmp_path)
    address = {"URL": "https://example.org/mars", "VERSION": "0.1.0"}
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=os.environ | address, check=True)
    before, after = (LINK.findall((at / "README.md").read_text("utf-8")) for at in (ROOT, tmp_path))
    ours = {link for link in before if not link.startswith("https://")}
    assert len(ours) > 10 and len(before) == len(after)
    assert all((ROOT / link.partition("#")[0]).is_file() for link in ours)
    assert [link for link in after if not link.startswith("https://")] == []
    assert "https://example.org/mars/raw/v0.1.0/docs/images/serve.png" in after
    assert "https://example.org/mars/blob/v0.1.0/docs/serving.md#the-page" in after


PROGRAMS = {
    "python": """case "$*" in *"build --outdir dist exporter"*) touch dist/adapter.whl;;
 *"build --outdir dist"*) touch dist/program.whl;; esac""",
    "mars-export": """if [ $1 = verify ]; then [ -z "$BROKEN" ] || [ "${2/$BROKEN/}" = "$2" ]
else mkdir "$5" && echo "$3" > "$5/manifest.json"; fi""",
}


def released(at: Path, broken: str = "") -> int:
    """`make release` with programs that write small files; its exit status."""
    for name in ("Makefile", "CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, at)
    (at / ".venv/bin").mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (at / ".venv/bin" / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (at / ".venv/bin" / name).chmod(0o755)
    (at / "runtime/cpp").mkdir(parents=True)
    (at / "runtime/cpp/wheels.sh").write_text("#!/bin/sh\ntouch $2/kernels.whl\n", encoding="utf-8")
    (at / "runtime/cpp/wheels.sh").chmod(0o755)
    for stamp in (".installed", ".installed-ci"):
        (at / ".venv" / stamp).touch()
    return subprocess.run(
        ["make", "release"], cwd=at, env=os.environ | {"BROKEN": broken}, check=False
    ).returncode


def test_make_release_fills_dist(tmp_path: Path) -> None:
    assert released(tmp_path) == 0
    dist = tmp_path / "dist"
    bundles = {f"mars-smollm2-135m-{precision}.bundle" for precision in ("w8a8", "int4", "fp32")}
    files = {"adapter.whl", "kernels.whl", "program.whl", "NOTES.md", *(f"{name}.tar" for name in bundles)}
    assert {file.name for file in dist.iterdir()} == files | {"SHA256SUMS"}
    sums = (dist / "SHA256SUMS").read_text().splitlines()
    assert {line.split()[1] for line in sums} == files
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    for name in bundles:
        with tarfile.open(dist / f"{name}.tar") as archive:
            assert archive.getnames() == [name, f"{name}/manifest.json"]
    section = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert (dist / "NOTES.md").read_text(encoding="utf-8").strip() == section.partition("\n")[2].strip()


def test_make_release_stops_at_a_bundle_that_fails(tmp_path: Path) -> None:
    assert released(tmp_path, broken="int4") != 0
    names = {file.name for file in (tmp_path / "dist").iterdir()}
    assert "mars-smollm2-135m-w8a8.bundle.tar" in names
    assert not names & {"mars-smollm2-135m-int4.bundle.tar", "SHA256SUMS"}
