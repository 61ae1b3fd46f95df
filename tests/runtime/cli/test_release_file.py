"""Release files: an archive by path or URL becomes a bundle if its hash is right, and nothing else does."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.shell import run
from support.tiny import Named

from mars_export import BundleError
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.cli import pull as pulled


@pytest.fixture
def archive(bundles: Named, tmp_path: Path) -> Path:
    """`tiny.bundle.tar` and SHA256SUMS, as `make release` writes them."""
    (tmp_path / "release").mkdir()
    path = tmp_path / "release/tiny.bundle.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(bundles("qwen2"), "tiny.bundle")
    write_sums(path)
    return path


def write_sums(archive: Path) -> None:
    line = f"{sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n"
    archive.with_name("SHA256SUMS").write_text(f"{'0' * 64}  other.whl\n{line}")


@pytest.fixture
def url(archive: Path) -> Iterator[str]:
    def handler(*arguments: Any) -> SimpleHTTPRequestHandler:
        return SimpleHTTPRequestHandler(*arguments, directory=str(archive.parent))

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{archive.name}"
        server.shutdown()


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_by_path(archive: Path, bundles: Named, tmp_path: Path) -> None:
    done = run("pull", archive, "-o", tmp_path / "new" / "mine.bundle", "--json")
    assert json.loads(done.stdout)["files"] == len(open_bundle(bundles("qwen2")).manifest.files)
    assert contents(tmp_path / "new" / "mine.bundle") == contents(bundles("qwen2"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.bundle"]
    assert "exists; choose another directory" in run("pull", archive, "-o", tmp_path / "new").stderr


def test_by_url(
    url: str, archive: Path, bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "give the archive's hash with --sha256, or a https:// address" in run("pull", url).stderr
    right = sha256(archive.read_bytes()).hexdigest()
    assert run("pull", url, "--sha256", right.upper()).returncode == 0
    assert contents(tmp_path / "tiny.bundle") == contents(bundles("qwen2")), "named like the archive"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["release", "tiny.bundle"]


def test_a_https_address_has_its_hash_beside_it(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Reply(io.BytesIO):
        url = ""

    def urlopen(url: str, **_: float) -> Reply:
        asked.append(url)
        reply = Reply((archive.parent / url.rpartition("/")[2]).read_bytes())
        reply.url = url
        return reply

    monkeypatch.setattr(pulled, "urlopen", urlopen)
    pulled.pull("https://host/v1/tiny.bundle.tar", tmp_path / "new")
    assert asked == ["https://host/v1/SHA256SUMS", "https://host/v1/tiny.bundle.tar"]


def test_wrong_hashes(url: str, archive: Path, tmp_path: Path) -> None:
    sums = archive.with_name("SHA256SUMS")
    for text, words in (
        (f"{'1' * 64}  {archive.name}\n", f"not {'1' * 64}; download it again"),
        ("", "has no hash of tiny.bundle.tar; give it with --sha256"),
        (None, "SHA256SUMS: .*No such file.*; give the archive's hash with --sha256"),
    ):
        sums.unlink() if text is None else sums.write_text(text)
        with pytest.raises(BundleError, match=words):
            pulled.pull(str(archive), tmp_path / "new")
    with pytest.raises(BundleError, match=r"other.tar: no such file; give an archive's path or URL"):
        pulled.pull(str(tmp_path / "other.tar"), tmp_path / "new")
    for source, words in ((url, "not 0{64}"), (f"{url}x", "404"), ("nowhere://x/y.tar", "unknown url type")):
        with pytest.raises(BundleError, match=words):
            pulled.pull(source, tmp_path / "new", sha256="0" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("../outside", tarfile.REGTYPE, "outside: not listed"),
        ("tiny.bundle/../../outside", tarfile.REGTYPE, "not a bundle"),
        ("/tiny.bundle/outside", tarfile.REGTYPE, "not a bundle"),
        ("tiny.bundle/link", tarfile.SYMTYPE, "it has 'tiny.bundle/link'"),
        ("tiny.bundle/sparse", tarfile.GNUTYPE_SPARSE, "it has 'tiny.bundle/sparse'"),
        ("tiny.bundle/pipe", tarfile.FIFOTYPE, "it has 'tiny.bundle/pipe'"),
        ("tiny.bundle/manifest.json", tarfile.REGTYPE, "FileExistsError"),
    ],
)
def test_hostile_archives(archive: Path, tmp_path: Path, name: str, kind: bytes, words: str) -> None:
    with tarfile.open(archive, "a") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    write_sums(archive)
    with pytest.raises(BundleError, match=words):
        pulled.pull(str(archive), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_archives_of_something_else(archive: Path, bundles: Named, tmp_path: Path) -> None:
    archive.write_bytes(b"no archive")
    write_sums(archive)
    with pytest.raises(BundleError, match="cannot be pulled: ReadError"):
        pulled.pull(str(archive), tmp_path / "new")
    damaged = Path(shutil.copytree(bundles("qwen2"), tmp_path / "damaged"))
    (damaged / "weights.bin").write_bytes(b"x")
    with tarfile.open(archive, "w") as tar:
        tar.add(damaged, "tiny.bundle")
    write_sums(archive)
    with pytest.raises(
        BundleError, match=r"^\S*tiny.bundle.tar: damaged or incomplete:\s*weights.bin: 1 bytes"
    ):
        pulled.pull(str(archive), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_options_of_the_other_kind(archive: Path) -> None:
    assert "--revision is for repositories" in run("pull", archive, "--revision", "main").stderr
    assert "--sha256 is for release files" in run("pull", "me/tiny", "--sha256", "0" * 64).stderr
