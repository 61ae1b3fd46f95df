"""A bundle as one file: the same bytes for the same content, back as it was, and nothing else is taken for
it.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shell import run
from support.tiny import Named

from mars_export.runtime import BundleError, Session
from mars_export.runtime.bundle import pack as packing
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.bundle.pack import pack, unpack


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")


@pytest.fixture
def packed(path: Path, tmp_path: Path) -> Path:
    pack(path, tmp_path / "mine.tar")
    return tmp_path / "mine.tar"


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_there_and_back(path: Path, packed: Path, tmp_path: Path) -> None:
    manifest = unpack(packed, tmp_path / "new" / "other.bundle")
    assert contents(tmp_path / "new" / "other.bundle") == contents(path)
    assert manifest == open_bundle(path).manifest
    ids = [
        Session.open(p, threads=1).generate([1, 2, 3]).token_ids
        for p in (path, tmp_path / "new/other.bundle")
    ]
    assert ids[0] == ids[1]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["other.bundle"]


def test_the_same_content_gives_the_same_bytes(path: Path, packed: Path, tmp_path: Path) -> None:
    twin = tmp_path / "elsewhere" / "twin"
    twin.mkdir(parents=True)
    for file in sorted(path.iterdir(), reverse=True):
        shutil.copyfile(file, twin / file.name)  # other times, another order, another owner's mode
        (twin / file.name).chmod(0o600)
    (twin / "notes.txt").write_text("not of the bundle")
    size = pack(twin, tmp_path / "twin.tar")
    assert packed.read_bytes() == (tmp_path / "twin.tar").read_bytes()
    assert size == packed.stat().st_size


def test_other_programs_can_read_it(path: Path, packed: Path) -> None:
    with tarfile.open(packed) as archive:
        members = {m.name: (m.mtime, m.uid, m.mode, m.size) for m in archive}
    assert list(members)[:2] == ["manifest.json", "manifest.sha256"]
    assert members == {name: (0, 0, 0o644, len(data)) for name, data in contents(path).items()}


def test_what_is_there_is_kept(path: Path, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"mine\.tar exists; give another place, or --force"):
        pack(path, packed)
    pack(path, packed, force=True)
    with pytest.raises(BundleError, match=r"mine\.bundle exists; give another place with -o"):
        unpack(packed, path)
    with pytest.raises(BundleError, match="exists; give another place$"):
        pack(path, tmp_path, force=True)


def test_a_damaged_bundle_is_not_packed(path: Path, tmp_path: Path) -> None:
    weights = path / "weights.bin"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    with pytest.raises(BundleError, match=r"weights\.bin: its content does not match"):
        pack(path, tmp_path / "out.tar")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.bundle"]


def test_a_bundle_that_changes_meanwhile_is_not_packed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = packing.open_bundle

    def open_then_change(*arguments: object, **options: object) -> object:
        bundle = seen(*arguments, **options)  # type: ignore[arg-type]
        data = (path / "weights.bin").read_bytes()
        (path / "weights.bin").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return bundle

    monkeypatch.setattr(packing, "open_bundle", open_then_change)
    with pytest.raises(BundleError, match="changed while the bundle was packed"):
        pack(path, tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


Change = Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]


def rewritten(packed: Path, change: Change, form: int = tarfile.GNU_FORMAT) -> Path:
    """The archive with some entries changed, by Python's own tar."""
    with tarfile.open(packed) as archive:
        entries = [(m, archive.extractfile(m).read()) for m in archive]  # type: ignore[union-attr]
    change(entries)
    with tarfile.open(packed, "w", format=form) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return packed


def entry(
    name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    return info, data


def renamed(name: str) -> Change:
    def change(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        entries[-1][0].name = name

    return change


def flipped(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    info, data = entries[-1]
    entries[-1] = (info, bytes([data[0] ^ 1]) + data[1:])


HOSTILE: dict[str, tuple[Change, str]] = {
    "climbs out": (renamed("../../evil"), "not a plain file with a plain name"),
    "absolute": (renamed("/tmp/evil"), "not a plain file with a plain name"),
    "hidden": (renamed(".bashrc"), "not a plain file with a plain name"),
    "in a folder": (renamed("a/b"), "not a plain file with a plain name"),
    "unlisted": (lambda e: e.append(entry("evil.so")), "not what its manifest lists"),
    "twice": (lambda e: e.append(e[-1]), "not what its manifest lists"),
    "manifest twice": (lambda e: e.append(e[0]), "not what its manifest lists"),
    "link": (lambda e: e.insert(2, entry("weights.bin", b"", tarfile.SYMTYPE, "/etc/passwd")), "plain file"),
    "hard link": (
        lambda e: e.insert(2, entry("weights.bin", b"", tarfile.LNKTYPE, "manifest.json")),
        "plain file",
    ),
    "pipe": (lambda e: e.insert(2, entry("weights.bin", b"", tarfile.FIFOTYPE)), "plain file"),
    "device": (lambda e: e.insert(2, entry("weights.bin", b"", tarfile.CHRTYPE)), "plain file"),
    "folder": (lambda e: e.insert(0, entry("x", b"", tarfile.DIRTYPE)), "plain file"),
    "sparse": (lambda e: e.insert(2, entry("weights.bin", b"", tarfile.GNUTYPE_SPARSE)), "plain file"),
    "long name": (lambda e: e.append(entry("n" * 150)), "plain file"),
    "no manifest": (lambda e: e.pop(0), "manifest.json is not where it should be"),
    "manifest later": (lambda e: e.append(e.pop(0)), "manifest.json is not where it should be"),
    "manifest too large": (
        lambda e: e.__setitem__(0, entry("manifest.json", bytes(80 << 20))),
        "this is not a packed bundle",
    ),
    "manifest no json": (lambda e: e.__setitem__(0, entry("manifest.json", b"\xff\x00{")), "not valid JSON"),
    "manifest changed": (
        lambda e: e.__setitem__(0, entry("manifest.json", e[0][1].replace(b'"block"', b' "block"'))),
        "manifest.json does not match manifest.sha256",
    ),
    "a file too few": (lambda e: e.pop(), "missing"),
    "another size": (
        lambda e: e.__setitem__(-1, entry(e[-1][0].name, e[-1][1] + b"x")),
        "not what its manifest",
    ),
    "other content": (flipped, "does not match the manifest's sha256"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_archive_leaves_nothing(attack: str, packed: Path, tmp_path: Path) -> None:
    change, message = HOSTILE[attack]
    archive, place = rewritten(packed, change), tmp_path / "place"
    place.mkdir()
    with pytest.raises(BundleError, match=message) as caught:
        unpack(archive, place / "new.bundle")
    assert list(place.iterdir()) == []
    assert ".partial" not in str(caught.value), "a message names what the user knows"


def test_extensions_of_tar_are_not_followed(packed: Path, tmp_path: Path) -> None:
    """A pax header may rename the entry behind it, or be of any size."""

    def pax(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        entries[2][0].pax_headers = {"path": "../evil"}

    with pytest.raises(BundleError, match="not a plain file"):
        unpack(rewritten(packed, pax, tarfile.PAX_FORMAT), tmp_path / "new.bundle")


@pytest.mark.parametrize("cut", [0, 100, 512, 700, 5000, -20000])
def test_a_file_that_ends_too_soon(cut: int, packed: Path, tmp_path: Path) -> None:
    packed.write_bytes(packed.read_bytes()[:cut])
    with pytest.raises(BundleError, match=r"ends too soon|missing"):
        unpack(packed, tmp_path / "new.bundle")
    assert not (tmp_path / "new.bundle").exists()


@pytest.mark.parametrize("data", [b"hello" * 300, b"\xff" * 4096, bytes(4096)])
def test_a_file_that_is_something_else(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(BundleError, match="not a packed bundle"):
        unpack(tmp_path / "x.tar", tmp_path / "new.bundle")


def test_from_the_shell(path: Path, tmp_path: Path) -> None:
    done = run("pack", path)
    assert (done.returncode, (tmp_path / "mine.bundle.tar").is_file()) == (0, True), done.stderr
    again = run("pack", path)
    assert (again.returncode, "--force" in again.stderr) == (1, True)
    shutil.rmtree(path)
    assert run("unpack", tmp_path / "mine.bundle.tar", "--json").returncode == 0
    assert run("inspect", path, "--verify").returncode == 0
    nothing = run("unpack", tmp_path / "nothing.tar")
    assert (nothing.returncode, "no such packed bundle" in nothing.stderr) == (1, True)
    hint = run("generate", tmp_path / "mine.bundle.tar", "-p", "x")
    assert "mars-export unpack" in hint.stderr
