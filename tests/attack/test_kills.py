"""The short form of benchmarks/attack/kills.py: writers of every command are killed, and what they wrote to
opens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attack import kills
from attack.writer import InBundle, Writer
from attack.writers import WRITERS
from support.paths import BUNDLE


def attack(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "attack.kills", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_killed_writers_leave_what_opens(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for arguments in (("--kills", "1"), ("--kills", "3", "--writers", "pack", "profiles")):
        done = attack(*arguments, "--state", str(state))
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    killed = [line["writer"] for line in lines if line["how"].startswith("killed")]
    wanted = dict.fromkeys(WRITERS, 1) | {"pack": 3, "profiles": 3}
    assert {name: killed.count(name) for name in WRITERS} == wanted
    assert len({(line["writer"], line["seed"]) for line in lines}) == len(lines), "none is done twice"


class Careless(Writer):
    """Writes in place, slowly, with a scratch file of its own that nobody clears."""

    name = "careless"

    def set_up(self) -> None:
        (self.home / "file").write_text("old")

    def write(self, seed: int) -> None:
        (self.home / f".scratch-{seed}").write_text("x")
        (self.home / "file").write_text("ne")
        kills.time.sleep(20)

    def finish(self, _seed: int) -> None:
        (self.home / "file").write_text("new")

    def wrong(self) -> Iterator[str]:
        if (there := (self.home / "file").read_text()) not in ("old", "new"):
            yield f"damaged: {there}"

    def names(self) -> set[str]:
        return {"file"}


def test_the_killer_sees_what_is_damaged_and_left_behind(tmp_path: Path) -> None:
    writer = Careless(BUNDLE, tmp_path / "place" / "home")
    line = kills.trial(writer, 0, 0.5)
    assert "killed" in line["how"]
    assert line["wrong"] == ["damaged: ne", "left behind: .scratch-0", "left behind: home/.scratch-0"]


def test_the_killer_sees_what_is_lost(tmp_path: Path) -> None:
    writer = WRITERS["profiles"](BUNDLE, tmp_path / "place" / "home")
    assert isinstance(writer, InBundle)
    assert list(kills.found(writer)) == []
    writer.done.value = 3
    assert list(kills.found(writer)) == ["change 3 was done, 0 is there"]
    writer.done.value = 0
    (writer.bundle / "left").write_text("x")
    assert list(kills.found(writer, is_done=True)) == ["left behind: mine.bundle/left"]
    (writer.bundle / "weights.bin").unlink()
    assert ["BundleError" in words for words in kills.found(writer)] == [True]


def test_a_start_that_fails_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Careless(BUNDLE, tmp_path / "place" / "home")
    monkeypatch.setattr(writer, "finish", lambda _: sys.exit(3))
    assert "the next start ended with 1" in kills.trial(writer, 0, 0.5)["wrong"]
