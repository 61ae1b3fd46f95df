"""Bundles on a hub, over a fake of its HTTP interface: there and back, and nothing else is taken for one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_hub import TOKEN, FakeHub, Repo, fake_hub
from support.manifests import GOOD
from support.shell import run
from support.tiny import Named

from mars_export.runtime import BundleError, Session
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.card import MARK, card, plain
from mars_export.runtime.hub import Hub

REPO = "me/tiny-mars"


# What huggingface_hub does with its own HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    with fake_hub() as served:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(Hub.__init__, "__defaults__", (served.url,))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served
        assert served.unknown == [], "the fake knows all that is asked"


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle"))


@pytest.fixture
def of(hub: FakeHub) -> Callable[[], Hub]:
    return lambda: Hub(hub.url)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_there_and_back(of: Callable[[], Hub], hub: FakeHub, path: Path, tmp_path: Path) -> None:
    done = of().push(path, REPO)
    files = hub.files(REPO)
    assert files.keys() == {*contents(path), "README.md", ".gitattributes"}
    assert done.num_files == len(files) - 1
    assert done.url.startswith(f"{hub.url}/{REPO}/commit/")
    assert hub.objects, "the weights went as a large file"
    manifest = of().pull(REPO, tmp_path / "new" / "other.bundle")
    assert contents(tmp_path / "new" / "other.bundle") == contents(path)
    assert manifest == open_bundle(path).manifest
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["other.bundle"], "nothing is left beside it"
    ids = [
        Session.open(p, threads=1).generate([1, 2, 3]).token_ids
        for p in (path, tmp_path / "new/other.bundle")
    ]
    assert ids[0] == ids[1]


def test_a_second_push_takes_away_what_is_no_longer_listed(
    of: Callable[[], Hub], hub: FakeHub, path: Path, tmp_path: Path
) -> None:
    of().push(path, REPO, private=True)
    assert hub.repos[REPO].private
    hub.repos[REPO].commit(hub.files(REPO) | {"mine.txt": b"of the repository's owner"})
    first = hub.repos[REPO].commits[-1][0]
    manifest = open_bundle(path).manifest
    (path / "tokenizer.json").rename(path / "words.json")
    assert manifest.text is not None
    files = tuple(replace(e, path="words.json") if e.path == "tokenizer.json" else e for e in manifest.files)
    write_manifest(path, replace(manifest, files=files, text=replace(manifest.text, tokenizer="words.json")))
    done = of().push(path, REPO)
    assert done.removed == ("tokenizer.json",)
    assert {"words.json", "mine.txt"} <= hub.files(REPO).keys()
    assert "tokenizer.json" not in hub.files(REPO)
    of().pull(REPO, tmp_path / "old", revision=first)
    assert open_bundle(tmp_path / "old").manifest == manifest


def test_a_card_of_somebody_s_own_stays(of: Callable[[], Hub], hub: FakeHub, path: Path) -> None:
    of().push(path, REPO)
    assert MARK.encode() in hub.files(REPO)["README.md"]
    hashes = {e.path: e.sha256 for e in open_bundle(path).manifest.files}
    profiles.store(path, Profile("sums", 0.9, "probability", "model", hashes["model.onnx"]))
    of().push(path, REPO)
    assert b"| sums | 0.9" in hub.files(REPO)["README.md"], "ours is written anew"
    hub.repos[REPO].commit(hub.files(REPO) | {"README.md": b"# Mine"})
    of().push(path, REPO)
    assert hub.files(REPO)["README.md"] == b"# Mine"


def test_a_repository_of_something_else_is_left_alone(
    of: Callable[[], Hub], hub: FakeHub, path: Path
) -> None:
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit({"config.json": b"{}", "model.safetensors": b"x"})
    with pytest.raises(BundleError, match=r"holds other files and no bundle \(config.json, model.safe"):
        of().push(path, REPO)
    assert len(hub.repos[REPO].commits) == 1
    of().push(path, REPO, force=True)
    assert {"config.json", "manifest.json"} <= hub.files(REPO).keys()


def test_what_the_hub_refuses_is_said(
    of: Callable[[], Hub], hub: FakeHub, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BundleError, match=r"(?s)me/none cannot be pulled: .*NotFound.*hf auth login"):
        of().pull("me/none", tmp_path / "x")
    with pytest.raises(BundleError, match="cannot be pulled: HFValidationError"):
        of().pull("../../etc", tmp_path / "x")
    of().push(path, REPO)
    with pytest.raises(BundleError, match="cannot be pulled: RevisionNotFound"):
        of().pull(REPO, tmp_path / "x", revision="v9")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(BundleError, match=r"(?s)cannot be pushed to: .*401.*hf auth login"):
        of().push(path, REPO)
    with pytest.raises(BundleError, match=f"{tmp_path} exists"):
        of().pull(REPO, tmp_path)
    hub.repos[REPO].commit({"README.md": b"hi"})
    with pytest.raises(BundleError, match="no bundle: it has no manifest.json"):
        of().pull(REPO, tmp_path / "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.bundle"]


def test_no_hub_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(BundleError, match=r"cannot be p"):
        Hub("http://127.0.0.1:9").pull(REPO, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "C:x"])
def test_names_of_a_strange_manifest_are_not_followed(
    name: str, of: Callable[[], Hub], hub: FakeHub, path: Path, tmp_path: Path
) -> None:
    of().push(path, REPO)
    manifest = open_bundle(path).manifest
    files = [replace(manifest.files[0], path=name), *manifest.files[1:]]
    text = replace(manifest, files=tuple(files)).to_json()
    hub.repos[REPO].commit(hub.files(REPO) | {"manifest.json": text.encode(), name: b"x"})
    hub.requests.clear()
    with pytest.raises(BundleError, match="is not a plain file name"):
        of().pull(REPO, tmp_path / "x")
    assert not [r for r in hub.requests if "resolve" in r and "manifest" not in r], (
        "nothing else was asked for"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.bundle"]


def test_other_content_than_listed_is_refused(
    of: Callable[[], Hub], hub: FakeHub, path: Path, tmp_path: Path
) -> None:
    of().push(path, REPO)
    weights = hub.files(REPO)["weights.bin"]
    hub.lie = {"weights.bin": weights[:-1] + b"\x55"}
    with pytest.raises(BundleError, match=rf"(?s)^{REPO}: damaged .*weights.bin: its content does not match"):
        of().pull(REPO, tmp_path / "x")
    hub.lie = {}
    hub.repos[REPO].commit(hub.files(REPO) | {"weights.bin": weights[:-1]})
    hub.requests.clear()
    with pytest.raises(BundleError, match=r"incomplete: weights.bin: \d+, the manifest says \d+"):
        of().pull(REPO, tmp_path / "x")
    assert not [r for r in hub.requests if "weights" in r], "it is not even fetched"
    hub.repos[REPO].commit(hub.files(REPO) | {"manifest.json": b" " * 17_000_000})
    with pytest.raises(BundleError, match="this is no bundle"):
        of().pull(REPO, tmp_path / "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.bundle"]


def test_a_push_in_between_is_not_lost(
    of: Callable[[], Hub], hub: FakeHub, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of().push(path, REPO)
    mine = of()
    real = mine.api.create_commit

    def late(*arguments: Any, **named: Any) -> Any:
        hub.repos[REPO].commit(hub.files(REPO) | {"news.txt": b"x"})
        return real(*arguments, **named)

    monkeypatch.setattr(mine.api, "create_commit", late)
    with pytest.raises(BundleError, match="412"):
        mine.push(path, REPO)
    assert "news.txt" in hub.files(REPO)


def test_the_commands(hub: FakeHub, path: Path, tmp_path: Path) -> None:
    done = run("push", path, REPO, "--license", "apache-2.0")
    assert done.returncode == 0, done.stderr
    assert f"mars-export pull {REPO}" in done.stdout
    assert b'license: "apache-2.0"' in hub.files(REPO)["README.md"]
    said = json.loads(run("push", path, REPO, "--json").stdout)
    assert said["repo"] == REPO
    assert said["removed"] == []
    pulled = run("pull", REPO, cwd=tmp_path)
    assert pulled.returncode == 0, pulled.stderr
    assert contents(tmp_path / "tiny-mars.bundle") == contents(path)
    assert json.loads(run("pull", REPO, "-o", tmp_path / "b", "--json").stdout)["files"] > 2
    assert run("pull", REPO, cwd=tmp_path).returncode == 1


# --- the card ---

EVIL = 'x` <script>alert(1)</script> | [a](javascript:b) **c** \x1b[31m\n\n# d @you https://e --- "f"'


def test_words_of_a_bundle_stay_words_in_its_card() -> None:
    variants = (replace(GOOD.variants[0], name=EVIL), *GOOD.variants[1:])
    evil = replace(
        GOOD, source=EVIL, producer=EVIL, variants=variants, revision=EVIL,
        profiles=(replace(GOOD.profiles[0], name=EVIL, evidence={"task": EVIL}),),
    )  # fmt: skip
    text = card(evil, "me/x", EVIL)
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert (
        json.loads(next(line for line in head.splitlines() if "license" in line).partition(": ")[2]) == EVIL
    )
    assert "base_model" not in head, "only what can be a repository's name"
    assert len(head.splitlines()) == len(card(GOOD, "me/x", "mit").split("\n---\n")[0].splitlines()) - 1
    assert "\x1b" not in body
    for line in body.splitlines():
        unescaped = re.sub(r"\\.", "", line.replace(MARK, ""))
        for sign in ("<", "[a](", "**", "`x", "@you", "https:"):
            assert sign not in unescaped
        assert not line.startswith("# d")
    tables = [line for line in body.splitlines() if line.startswith("|")]
    # A bar within a cell is escaped: every row has its table's columns.
    assert {line.replace("\\|", "").count("|") for line in tables} == {3, 7, 8}


def test_a_card_says_what_a_user_asks() -> None:
    text = card(replace(GOOD, source="org/model", revision="abc"), REPO)
    assert 'base_model: "org/model"' in text
    assert f"mars-export pull {REPO} -o tiny-mars.bundle" in text
    assert "1.0e-01 | 9 of 9 | the exporter |" in text
    assert "| math | 0.9 (probability) | model |" in plain_again(text)
    assert "Not stated. The weights were made from org/model; its licence holds for them." in text


def test_folders_of_whoever_exported_it_are_not_shown() -> None:
    for source in ("/home/ann/secret/mymodel", "C:\\Users\\ann\\mymodel", "../ann/mymodel/"):
        text = card(replace(GOOD, source=source), REPO)
        assert "made from mymodel." in text
        assert "ann" not in text


def plain_again(text: str) -> str:
    return text.replace("\\", "")


def test_escaping_leaves_plain_words() -> None:
    assert plain("SmolLM2-135M, 4.5 tokens; ok") == "SmolLM2-135M, 4.5 tokens; ok"
    assert plain("a\r\nb\u202ec") == "a  b c"
