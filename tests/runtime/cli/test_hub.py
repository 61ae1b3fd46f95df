"""Bundles on a hub that is a directory here: there and back, and errors of ours for everything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from support.shell import run
from support.tiny import Named

from mars_export import BundleError
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.cli import pull as hub

REPO = "me/tiny-mars"


class Place:
    """Repositories as directories."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def snapshot_download(
        self, repo: str, local_dir: Path, allow_patterns: list[str], revision: str | None = None
    ) -> None:
        if revision is not None or not (self.root / repo).is_dir():
            raise ValueError(f"404 for {repo}")
        local_dir = Path(local_dir)
        (local_dir / ".cache").mkdir(exist_ok=True)
        for name in allow_patterns:
            if (self.root / repo / name).exists():
                shutil.copy(self.root / repo / name, local_dir)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = Place(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", place.snapshot_download)
    return place.root / REPO


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle"))


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_it_downloads_what_the_manifest_lists(there: Path, path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, there)
    (there / "README.md").write_text("a model card")
    hub.pull(REPO, tmp_path / "new" / "other.bundle")
    assert contents(tmp_path / "new" / "other.bundle") == contents(path)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["other.bundle"]


def test_command(there: Path, path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, there)
    done = run("pull", REPO, "-o", tmp_path / "b", "--json")
    assert json.loads(done.stdout)["files"] == len(open_bundle(path).manifest.files)
    assert "exists; choose another directory with -o" in run("pull", REPO, "-o", tmp_path / "b").stderr


def test_what_is_no_good_bundle_leaves_nothing(there: Path, path: Path, tmp_path: Path) -> None:
    for damage, message in (
        (lambda: None, "cannot be pulled: ValueError: 404"),
        (lambda: there.mkdir(parents=True), "not a bundle: it has no manifest.json"),
        (
            lambda: (
                shutil.copytree(path, there, dirs_exist_ok=True) and (there / "weights.bin").write_bytes(b"x")
            ),
            "weights.bin: 1 bytes",
        ),
        (lambda: (there / "manifest.json").write_text("{}"), "no `format_version`"),
    ):
        damage()
        with pytest.raises(BundleError, match=message):
            hub.pull(REPO, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        assert not list(tmp_path.glob(".*"))


def test_serve_pulls_a_bundle_once(
    there: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BundleError, match="404"):
        hub.pull_once(REPO)
    shutil.copytree(path, there)
    assert contents(pulled := hub.pull_once(REPO)) == contents(path)
    assert pulled.name == "tiny-mars.bundle", "the model's name"
    shutil.rmtree(there)
    assert hub.pull_once(REPO) == pulled, "the hub is not asked again"
