"""Bundles on a hub that is a directory here: there and back, and errors of ours for everything else."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from support.shell import run
from support.tiny import Named

from mars_export import BundleError
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.cli import hub_repository as hub

REPO = "me/tiny-mars"


class Place:
    """Repositories as directories."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, repo: str, **_: Any) -> None:
        (self.root / repo).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, repo_id: str, folder_path: Path, delete_patterns: list[str]) -> Any:
        root = self.root / repo_id
        for path in [file for file in root.rglob("*") if file.is_file()]:
            if any(fnmatch(str(path.relative_to(root)), pattern) for pattern in delete_patterns):
                path.unlink()
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def file_exists(self, repo: str, name: str) -> bool:
        return (self.root / repo / name).exists()

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
    place: Any = Place(tmp_path / "hub")

    class Card(huggingface_hub.ModelCard):
        def push_to_hub(self, repo_id: str, *_: Any, **__: Any) -> str:
            return str((place.root / repo_id / "README.md").write_text(str(self)))

    place.ModelCard, place.ModelCardData = Card, huggingface_hub.ModelCardData
    monkeypatch.setattr(hub, "_library", lambda: place)
    return place.root / REPO


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle"))


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_there_and_back(there: Path, path: Path, tmp_path: Path) -> None:
    assert hub.push(path, REPO, licence="apache-2.0").endswith("/commit/1")
    card = (there / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert f"mars-export pull {REPO} -o tiny-mars.bundle" in card
    (there / "README.md").write_text("mine")
    hub.push(path, REPO)
    assert contents(there) == contents(path) | {"README.md": b"mine"}, "a card stays"
    hub.pull(REPO, tmp_path / "new" / "other.bundle")
    assert contents(tmp_path / "new" / "other.bundle") == contents(path)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["other.bundle"]


def test_a_push_deletes_only_files_of_the_bundle_before(there: Path, path: Path) -> None:
    foreign = {
        "pytorch_model.bin": b"p", "other.onnx": b"o", "sub/model.onnx": b"s", "training_args.bin": b"t",
    }  # fmt: skip
    for name, content in foreign.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    hub.push(path, REPO)
    old = (path / "weights.bin").rename(path / "renamed.bin")
    manifest = (path / "manifest.json").read_text().replace('"weights.bin"', '"renamed.bin"')
    (path / "manifest.json").write_text(manifest)
    assert "renamed.bin" in manifest and old.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "open_bundle", lambda *_, **__: SimpleNamespace(path=path))
        hub.push(path, REPO)
    assert not (there / "weights.bin").exists() and (there / "renamed.bin").exists()
    (there / "manifest.json").write_text("not ours")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "open_bundle", lambda *_, **__: SimpleNamespace(path=path))
        hub.push(path, REPO)
    assert {name: (there / name).read_bytes() for name in foreign} == foreign


@pytest.mark.usefixtures("there")
def test_commands(path: Path, tmp_path: Path) -> None:
    assert json.loads(run("push", path, REPO, "--json").stdout)["repo"] == REPO
    done = run("pull", REPO, "-o", tmp_path / "b", "--json")
    assert json.loads(done.stdout)["files"] == len(open_bundle(path).manifest.files)
    assert "exists; choose another directory with -o" in run("pull", REPO, "-o", tmp_path / "b").stderr


def test_what_is_no_good_bundle_leaves_nothing(there: Path, path: Path, tmp_path: Path) -> None:
    for damage, message in (
        (lambda: None, "cannot be pulled: ValueError: 404"),
        (lambda: there.mkdir(parents=True), "not a bundle: it has no manifest.json"),
        (lambda: hub.push(path, REPO) and (there / "weights.bin").write_bytes(b"x"), "weights.bin: 1 bytes"),
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
    hub.push(path, REPO)
    assert contents(pulled := hub.pull_once(REPO)) == contents(path)
    assert pulled.name == "tiny-mars.bundle", "the model's name"
    shutil.rmtree(there)
    assert hub.pull_once(REPO) == pulled, "the hub is not asked again"
