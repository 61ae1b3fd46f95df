"""What every writer is: the place it writes to, one write, what must hold whenever it is killed.

Knows no processes. A writer counts what it has finished in `Writer.done`, which it shares with whoever kills
it.
"""

from __future__ import annotations

import mmap
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attack.beside import profile
from mars_export.runtime.bundle import prefixes, profiles
from mars_export.runtime.bundle.manifest import MANIFEST_FILE
from mars_export.runtime.bundle.open import CHECKSUM_FILE, open_bundle
from mars_export.runtime.bundle.prefixes import Made
from mars_export.runtime.bundle.profiles import sha256_of
from mars_export.runtime.bundle.stored import StoredPrefix
from mars_export.runtime.warm import read, written

KEPT = "kept"  # a profile and a prefix that nobody touches


class Counter:
    """A number that a process and its parent both see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    @value.setter
    def value(self, number: int) -> None:
        self._memory[:8] = number.to_bytes(8, "little")


class Writer(ABC):
    """`home` is where it writes; nothing else is there. `good`: a bundle that may be copied."""

    def __init__(self, good: Path, home: Path) -> None:
        self.good, self.home, self.done = good, home, Counter()
        self.renew()

    def renew(self) -> None:
        """The place as it is at first."""
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """What is there before the first writer."""

    def begin(self, seed: int) -> None:  # noqa: B027 (most find nothing)
        """Before each writer: what it may find."""

    @abstractmethod
    def write(self, seed: int) -> None:
        """What is killed; it may be a write for ever."""

    def finish(self, seed: int) -> None:
        """The next start, which comes to its end."""
        self.write(seed)

    @abstractmethod
    def wrong(self) -> Iterator[str]:
        """What is damaged or lost; errors that it raises are, too."""

    @abstractmethod
    def names(self) -> set[str]:
        """What may lie in `home` once a writer has come to its end, as paths in it."""


def listed(path: Path, within: Path) -> set[str]:
    """The files of a bundle."""
    files = {entry.path for entry in open_bundle(path).manifest.files} | {MANIFEST_FILE, CHECKSUM_FILE}
    return {str((path / name).relative_to(within)) for name in files}


class InBundle(Writer):
    """A writer that changes a bundle, in which a profile and a prefix are kept."""

    @property
    def bundle(self) -> Path:
        return self.home / "mine.bundle"

    def set_up(self) -> None:
        shutil.copytree(self.good, self.bundle)
        (self.bundle / ".verified.json").unlink(missing_ok=True)  # an old reader's note
        profiles.store(self.bundle, profile(open_bundle(self.bundle).manifest, KEPT, 0))
        prefixes.store(self.bundle, [prefix(self.bundle, KEPT, 0)])

    def wrong(self) -> Iterator[str]:
        manifest = open_bundle(self.bundle, full=True).manifest
        yield from (f"a lost profile: {KEPT}" for _ in range(KEPT not in {p.name for p in manifest.profiles}))
        yield from (f"a lost prefix: {KEPT}" for _ in range(KEPT not in {p.name for p in manifest.prefixes}))
        for stored in manifest.prefixes:
            if len(read(self.bundle, stored, manifest.model)[0]) != stored.length:
                yield f"{stored.name}: of another length"
        used = {p.file for p in manifest.prefixes}
        for entry in manifest.files:
            if entry.path.startswith("prefix-") and entry.path not in used:
                yield f"listed and not used: {entry.path}"

    def names(self) -> set[str]:
        return listed(self.bundle, self.home)


def prefix(path: Path, name: str, seed: int) -> Made:
    """Any entries; only their size is the model's."""
    manifest, draw = open_bundle(path).manifest, np.random.default_rng(seed)
    model, variant = manifest.model, manifest.variants[0]
    ids = draw.integers(0, model.vocab_size, int(draw.integers(1, 60))).tolist()
    shape = (model.num_kv_heads, len(ids), model.head_dim)
    dtype = "f4" if variant.kv_dtype == "float32" else "f2"
    arrays = [draw.standard_normal(shape).astype(dtype) for _ in range(2 * model.num_layers)]
    file, content = written(ids, arrays, variant.kv_dtype)
    stored = StoredPrefix(
        name, file, len(ids), None, variant.name, sha256_of(manifest, variant.file) or "",
        sha256_of(manifest, variant.weights), variant.precision, variant.kv_dtype, variant.kv_layout, "cpu",
        variant.accuracy_level,
    )  # fmt: skip
    return stored, content
