"""Attacks by a bundle: planted links, pipes and devices, manifests that take for ever, unlisted data, two
writers, what a terminal obeys.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.confined import confined
from support.manifests import GOOD, changed, rehash
from typer.testing import CliRunner

from mars_export import BundleError, Session, SessionError
from mars_export.cli import app
from mars_export.runtime.bundle.files import write_whole
from mars_export.runtime.bundle.manifest import Profile, parse_manifest
from mars_export.runtime.bundle.open import open_bundle, write_manifest


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("mine")
    return tmp_path / "victim"


def test_whole_writing_uses_a_name_of_its_own(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "foreseen")
    (tmp_path / ".a.foreseen").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", b"new")
    assert victim.read_text() == "mine"
    monkeypatch.undo()
    write_whole(tmp_path / "a", b"new")
    write_whole(tmp_path / "a", b"newer")
    assert (tmp_path / "a").read_bytes() == b"newer"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o600 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.foreseen", "a", "victim"]


OPEN = """
from mars_export.runtime.errors import BundleError
from mars_export.runtime.bundle.open import open_bundle
try:
    open_bundle(sys.argv[1])
    print("opened")
except BundleError as error:
    print("refused:", error)
"""


def pipe(file: Path) -> None:
    os.mkfifo(file)


def zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


def sparse(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(6 << 30)


def circle(file: Path) -> None:
    file.symlink_to(file.name)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "weights.bin"])
@pytest.mark.parametrize("instead", [pipe, zeros, sparse, circle])
def test_a_pipe_a_device_and_a_huge_file_in_the_place_of_a_file(
    name: str, instead: Callable[[Path], None], path: Path
) -> None:
    (path / name).unlink(missing_ok=True)
    instead(path / name)
    answer = confined(OPEN, str(path), gigabytes=1.0, seconds=20)
    assert answer.startswith("refused:")


DEEP = "[" * 900 + "]" * 900
WHOLE = json.loads(GOOD.to_json())


def many(part: str, number: int, **names: str) -> str:
    """The good manifest with `number` entries in a list, each with its own name."""
    first = WHOLE[part][0]
    entries = [first | {key: f"{value}{i}" for key, value in names.items()} for i in range(number)]
    return json.dumps(WHOLE | {part: entries})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (lambda: many("files", 300_000, path="f"), "files: a list of at most 1000 entries is expected"),
        (lambda: many("variants", 40_000, name="v"), "variants: a list of at most 64 entries"),
        (lambda: many("profiles", 20_000, name="p"), "profiles: a list of at most 10000 entries"),
        (lambda: many("files", 1000, path="f"), "which `files` does not list"),
        (lambda: many("files", 1000), "is listed twice"),
        (lambda: json.dumps(WHOLE | {"files": [3] * 1000}), "1000 problems"),
        (lambda: GOOD.to_json().replace('"block": 8', '"block": 8, "block": 9'), "'block' is given twice"),
        (lambda: changed("source", "\ud800"), "not valid JSON"),
        (lambda: changed("format_version", "9" * 5000), "no `format_version`"),
        (lambda: changed("profiles.0.evidence", {"a": float("nan")}),
         "evidence: a number in it is not finite"),
        (lambda: changed("profiles.0.evidence", {"a": "DEEP"}).replace('"DEEP"', DEEP),
         "evidence: more than 32 levels"),
        (lambda: changed("block", "DEEP").replace('"DEEP"', DEEP), "block: an integer of 1 to 4096"),
        (lambda: "{" + ",".join(f'"k{i}":0' for i in range(800_000)) + ',"k1":0}', "'k1' is given twice"),
    ],
)  # fmt: skip
def test_manifests_that_took_for_ever_or_fell(document: Callable[[], str], message: str) -> None:
    text = document()
    start = time.process_time()
    with pytest.raises(BundleError, match=message) as caught:
        parse_manifest(text)
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < 10_000


def test_a_file_that_the_manifest_does_not_list_is_refused(path: Path) -> None:
    (path / "unlisted.bin").write_bytes(b"abcd")
    with pytest.raises(BundleError, match=r"unlisted.bin: not listed in the manifest; remove it"):
        open_bundle(path)


def test_onnx_runtime_reads_no_data_outside_the_bundle(path: Path) -> None:
    model = onnx.load(path / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    shutil.copy(path / "weights.bin", path.parent / "outside.bin")
    next(e for e in tensor.external_data if e.key == "location").value = "../outside.bin"
    (path / "model.onnx").write_bytes(model.SerializeToString())
    rehash(path)
    with pytest.raises(SessionError, match=r"cannot load the graph: .*outside"):
        Session.open(path, threads=1)


STORE = """
import sys
from dataclasses import replace
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Profile
path, name, number, digest = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
for i in range(number):
    profiles.store(path, Profile(f"{name}{i}", 0.9, "probability", "model", digest))
"""


def test_two_writers_lose_nothing(path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    digest = next(e.sha256 for e in open_bundle(path).manifest.files if e.path == "model.onnx")
    writers = [
        subprocess.Popen([sys.executable, "-c", STORE, str(path), name, "15", digest], env=environment)
        for name in "ab"
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    stored = {p.name for p in open_bundle(path, full=True).manifest.profiles}
    assert stored == {f"{name}{i}" for name in "ab" for i in range(15)}


HOSTILE = "[/x][bold]\x1b]0;owned\x07\u202e"


def test_nothing_that_a_terminal_obeys_is_printed(path: Path) -> None:
    manifest = open_bundle(path).manifest
    digest = next(e.sha256 for e in manifest.files if e.path == "model.onnx")
    variant = replace(manifest.variants[0], name=HOSTILE)
    stored = Profile(HOSTILE, 0.9, "probability", HOSTILE, digest, {"task": HOSTILE})
    write_manifest(
        path, replace(manifest, source=HOSTILE, producer=HOSTILE, variants=(variant,), profiles=(stored,))
    )
    for command in (["inspect"], ["doctor"], ["profiles", "list"], ["profiles", "remove"]):
        name = [HOSTILE] if command[-1] == "remove" else []
        result = CliRunner().invoke(app, [*command, str(path), *name])
        assert result.exit_code == 0, result.output
        assert "[/x][bold]\\x1b]0;owned\\x07\\u202e" in result.output.replace("\n", "")
        assert not set("\x1b\x07\u202e") & set(result.output)
