"""What a release is made of: a source archive with all that is tracked, words for a package index, links."""

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

INDEXED = {"description", "readme", "license", "requires-python", "keywords", "classifiers"}
LINK = re.compile(r"\]\(([\w./#:-]+)\)")


def test_the_source_archive_has_all_that_is_tracked(tmp_path: Path) -> None:
    need("setuptools", "dev")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
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


@pytest.mark.parametrize("file", ["pyproject.toml", "exporter/default/pyproject.toml"])
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
