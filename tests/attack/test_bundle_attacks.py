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
from typing import Any

import onnx
import pytest
from support.confined import confined
from support.manifests import GOOD, changed
from typer.testing import CliRunner

from mars_export.cli import app
from mars_export.runtime import BundleError, Session
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.external import contents
from mars_export.runtime.bundle.files import describe, locked, write_whole
from mars_export.runtime.bundle.manifest import Profile, parse_manifest
from mars_export.runtime.bundle.open import changing, open_bundle, write_manifest
from mars_export.runtime.console import print_json

Named = Callable[[str], Path]


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "foreign.bundle")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("mine")
    return tmp_path / "victim"


def profile(path: Path, name: str = "sums") -> Profile:
    digest = next(e.sha256 for e in open_bundle(path).manifest.files if e.path == "model.onnx")
    return Profile(name, 0.9, "probability", "model", digest)


def test_planted_links_are_not_followed(path: Path, victim: Path) -> None:
    """Once these names were predictable, and a link in their place led the writer to any file of the user."""
    for stem in (".verified.json", ".manifest.json", ".manifest.sha256"):
        for suffix in ("", f".{os.getpid()}"):
            (path / f"{stem}{suffix}").symlink_to(victim)
    Session.open(path, threads=1)
    profiles.store(path, profile(path))
    profiles.remove(path, "sums")
    assert victim.read_text() == "mine"
    assert not (path / "manifest.json").is_symlink()


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


def test_a_bundle_s_word_on_itself_is_not_believed(path: Path) -> None:
    """A stamp that comes with the bundle said once that its files need not be hashed."""
    weights = path / "weights.bin"
    with weights.open("r+b") as file:
        file.write(b"\xaa\xbb")
    entry = next(
        e for e in json.loads((path / "manifest.json").read_text())["files"] if e["path"] == weights.name
    )
    state = weights.stat()
    stamp = {weights.name: [entry["sha256"], state.st_size, state.st_mtime_ns, state.st_ino]}
    (path / ".verified.json").write_text(json.dumps(stamp))
    with pytest.raises(BundleError, match=r"weights.bin: its content does not match"):
        open_bundle(path)


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


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "weights.bin", ".verified.json"])
@pytest.mark.parametrize("instead", [pipe, zeros, sparse, circle])
def test_a_pipe_a_device_and_a_huge_file_in_the_place_of_a_file(
    name: str, instead: Callable[[Path], None], path: Path
) -> None:
    (path / name).unlink(missing_ok=True)
    instead(path / name)
    answer = confined(OPEN, str(path), gigabytes=1.0, seconds=20)
    assert answer.startswith("opened" if name == ".verified.json" else "refused:")


def test_a_pipe_for_a_stamp(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    open_bundle(path)
    (stamp,) = (tmp_path / "cache" / "verified").iterdir()
    stamp.unlink()
    os.mkfifo(stamp)
    open_bundle(path)
    assert stamp.is_file()


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
        (lambda: many("files", 300_000, path="f"), "files: at most 1000 entries are expected, not 300000"),
        (lambda: many("variants", 40_000, name="v"), "variants: at most 64 entries are expected, not 40000"),
        (lambda: many("profiles", 20_000, name="p"), "profiles: at most 10000 entries"),
        (lambda: many("files", 1000, path="f"), "which `files` does not list"),
        (lambda: many("files", 1000), "is listed twice"),
        (lambda: json.dumps(WHOLE | {"files": [3] * 1000}), "4000 problems"),
        (lambda: GOOD.to_json().replace('"block": 8', '"block": 8, "block": 9'), "'block' is given twice"),
        (lambda: changed("source", "\ud800"), "not valid JSON"),
        (lambda: changed("format_version", "9" * 5000), "no `format_version`"),
        (
            lambda: changed("profiles.0.evidence", {"a": float("nan")}),
            "evidence: a number in it is not finite",
        ),
        (
            lambda: changed("profiles.0.evidence", {"a": "DEEP"}).replace('"DEEP"', DEEP),
            "evidence: more than 32 levels",
        ),
        (lambda: changed("block", "DEEP").replace('"DEEP"', DEEP), "block: an integer of 1 to 4096"),
        (lambda: "{" + ",".join(f'"k{i}":0' for i in range(800_000)) + ',"k1":0}', "'k1' is given twice"),
    ],
)
def test_manifests_that_took_for_ever_or_fell(document: Callable[[], str], message: str) -> None:
    text = document()
    start = time.process_time()
    with pytest.raises(BundleError, match=message) as caught:
        parse_manifest(text)
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < 10_000


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_read_can_be_written(path: Path) -> None:
    deepest = replace(
        open_bundle(path).manifest, profiles=(replace(profile(path), evidence={"a": nested(30)}),)
    )
    assert parse_manifest(deepest.to_json()) == deepest


def rewritten(path: Path, name: str, model: onnx.ModelProto) -> None:
    """Another graph with all hashes right, as a hostile author makes it."""
    (path / name).write_bytes(model.SerializeToString())
    manifest = open_manifest(path)
    files = tuple(describe(path / e.path) if e.path == name else e for e in manifest.files)
    write_manifest(path, replace(manifest, files=files))


def open_manifest(path: Path) -> Any:
    return parse_manifest((path / "manifest.json").read_text())


def elsewhere(tensor: onnx.TensorProto, location: str) -> onnx.TensorProto:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def inside(model: onnx.ModelProto, location: str, place: str) -> None:
    tensor = elsewhere(onnx.TensorProto(name="planted", data_type=1, dims=[1]), location)
    graph = onnx.GraphProto(name="inner")
    if place == "initializer":
        model.graph.initializer.append(tensor)
    elif place == "sparse":
        model.graph.sparse_initializer.add().values.CopyFrom(tensor)
    elif place == "constant":
        model.graph.node.add(op_type="Constant").attribute.add(name="value", type=4).t.CopyFrom(tensor)
    elif place == "subgraph":
        graph.initializer.append(tensor)
        model.graph.node.add(op_type="If").attribute.add(name="then_branch", type=5).g.CopyFrom(graph)
    elif place == "function":
        node = model.functions.add(name="f", domain="d").node.add(op_type="Constant")
        node.attribute.add(name="values", type=9).tensors.append(tensor)
    else:
        graph.initializer.append(tensor)
        model.training_info.add().algorithm.CopyFrom(graph)


@pytest.mark.parametrize("place", ["initializer", "sparse", "constant", "subgraph", "function", "training"])
def test_data_that_the_manifest_does_not_list_is_refused(place: str, path: Path) -> None:
    model = onnx.load(path / "model.onnx", load_external_data=False)
    inside(model, "unlisted.bin", place)
    (path / "unlisted.bin").write_bytes(b"abcd")
    rewritten(path, "model.onnx", model)
    with pytest.raises(
        BundleError, match="the graph takes data from 'unlisted.bin', which `files` does not list"
    ):
        open_bundle(path)


def test_the_names_of_external_data_are_those_that_onnx_finds(bundles: Named) -> None:
    for name in ("llama", "qwen3"):
        model = onnx.load(bundles(name) / "model.onnx", load_external_data=False)
        known = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
        with (bundles(name) / "model.onnx").open("rb") as file:
            assert contents(file.fileno()).names == known == {"weights.bin"}


@pytest.mark.parametrize(
    "data", [b"", b"\x0f", b"\xff" * 40, b"\x3a\x7f", b"\x3a", b"\x09\0", b"\x3a\x02\x0b\x00"]
)
def test_what_is_no_graph_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(data)
    with (
        (tmp_path / "x.onnx").open("rb") as file,
        pytest.raises(ValueError, match="no ONNX graph|not an ONNX graph"),
    ):
        contents(file.fileno())


STORE = """
import sys
from dataclasses import replace
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle
path, name, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
digest = next(e.sha256 for e in open_bundle(path).manifest.files if e.path == "model.onnx")
for i in range(number):
    profiles.store(path, Profile(f"{name}{i}", 0.9, "probability", "model", digest))
"""


def test_two_writers_lose_nothing_and_no_reader_fails_beside_them(path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writers = [
        subprocess.Popen([sys.executable, "-c", STORE, str(path), name, "15"], env=environment)
        for name in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        open_bundle(path)
    assert [writer.returncode for writer in writers] == [0, 0]
    stored = {p.name for p in open_bundle(path, full=True).manifest.profiles}
    assert stored == {f"{name}{i}" for name in "ab" for i in range(15)}


def test_a_writer_that_never_ends_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.bundle.open.WRITERS_WAIT", 0.1)
    before = (path / "manifest.json").read_bytes()
    with locked(path, 1.0):
        open_bundle(path)
        with pytest.raises(BundleError, match="another program has been writing to it"), changing(path):
            pass
    assert (path / "manifest.json").read_bytes() == before


def test_a_reader_between_two_writes_reads_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest was read, then a writer replaced it and its checksum: nothing is damaged."""
    from mars_export.runtime.bundle import open as module

    stored, real, reads = profile(path), module.read_small, []

    def read(file: Path, limit: int) -> bytes:
        data = real(file, limit)
        if not reads:
            reads.append(file)
            profiles.store(path, stored)
        return data

    monkeypatch.setattr(module, "read_small", read)
    assert [p.name for p in open_bundle(path).manifest.profiles] == ["sums"]


HOSTILE = "[/x][bold]\x1b]0;owned\x07\u202e"


def test_nothing_that_a_terminal_obeys_is_printed(path: Path) -> None:
    manifest = open_bundle(path).manifest
    digest = next(e.sha256 for e in manifest.files if e.path == "model.onnx")
    variant = replace(manifest.variants[0], name=HOSTILE)
    stored = Profile(HOSTILE, 0.9, "probability", HOSTILE, digest, {"task": HOSTILE})
    write_manifest(
        path, replace(manifest, source=HOSTILE, producer=HOSTILE, variants=(variant,), profiles=(stored,))
    )
    for command in (
        ["inspect"],
        ["doctor"],
        ["profiles", "list"],
        ["profiles", "show"],
        ["profiles", "remove"],
    ):
        name = [HOSTILE] if command[-1] in ("show", "remove") else []
        result = CliRunner().invoke(app, [*command, str(path), *name])
        assert result.exit_code == 0, result.output
        assert "[/x][bold]\\x1b]0;owned\\x07\\u202e" in result.output.replace("\n", "")
        assert not set("\x1b\x07\u202e") & set(result.output)


def test_json_output_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), float("inf"), 0.5], "b": "x\ud800é"})
    assert capsys.readouterr().out == '{"a": [null, null, 0.5], "b": "x\\\\ud800é"}\n'
