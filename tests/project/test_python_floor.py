"""What runs on a device keeps to the oldest Python that pyproject.toml allows: JetPack 6 has 3.10."""

from __future__ import annotations

import sys

import tomllib
from support.missing import need
from support.paths import ROOT
from support.shell import call

PLACES = ("runtime", "exporter", "calibration", "cli.py", "__init__.py")


def test_nothing_newer_than_the_floor_is_used() -> None:
    need("vermin", "dev")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floor = project["requires-python"].removeprefix(">=")
    command = [
        sys.executable, "-c", "import vermin; vermin.main()", f"-t={floor}-", "--no-tips", "--violations",
        "--eval-annotations",
    ]  # fmt: skip
    paths = [str(ROOT / place) for place in PLACES]
    done = call(*command, *paths)
    assert done.returncode == 0, done.stdout
    assert "Minimum required versions: 3.10" in done.stdout, "the tool looked at our code"
