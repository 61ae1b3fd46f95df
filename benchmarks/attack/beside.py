"""Another process that stores and removes profiles of a bundle as fast as it may, until its input ends.

python -m attack.beside BUNDLE NAME

It looks at its own profile after each change: when another writer's change makes it go or come back, an
update was lost. Its last line is JSON: the number of changes, and what was wrong.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Manifest, Profile
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.bundle.profiles import sha256_of

PAUSE = 0.02  # seconds between two changes


def profile(manifest: Manifest, name: str, number: int) -> Profile:
    """A profile that is not stale, and says which change it is."""
    variant = manifest.variants[0]
    graph, weights = (sha256_of(manifest, file) for file in (variant.file, variant.weights))
    evidence = {"num_rows": number, "max_drop": 0.01, "date": "2026-01-01", "notes": ["x" * (number % 300)]}
    tau = 0.5 + number % 50 / 100
    return Profile(
        name, tau, "probability", variant.name, graph or "", evidence, weights, precision=variant.precision,
        accuracy_level=variant.accuracy_level,
    )  # fmt: skip


def present(path: Path, name: str) -> list[int]:
    """Which changes of a writer are in the bundle: one, or none."""
    return [p.evidence["num_rows"] for p in open_bundle(path).manifest.profiles if p.name == name]


def change(path: Path, name: str, number: int) -> list[int]:
    """One change; returns what `present` must be afterwards."""
    if number % 5 == 4:
        profiles.remove(path, name)
        return []
    profiles.store(path, profile(open_bundle(path).manifest, name, number))
    return [number]


def main() -> None:
    path, name = Path(sys.argv[1]), sys.argv[2]
    number, wrong = 0, []
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        wanted = change(path, name, number)
        if (found := present(path, name)) != wanted:
            wrong.append(f"{name}: change {number} left {found}")
        number += 1
    print(json.dumps({"changes": number, "wrong": wrong[:20]}))


@dataclass(slots=True)
class Beside:
    """Such a process, as its parent sees it."""

    process: subprocess.Popen[str]

    @staticmethod
    def start(path: Path, name: str) -> Beside:
        command = [sys.executable, "-m", "attack.beside", str(path), name]
        return Beside(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def end(self) -> tuple[int, list[str]]:
        """The number of its changes, and what was wrong."""
        said, _ = self.process.communicate(timeout=60)
        if self.process.returncode:
            return 0, [f"a writer of profiles ended with {self.process.returncode}"]
        line = json.loads(said)
        return line["changes"], line["wrong"]


if __name__ == "__main__":
    main()
