"""What writes, command by command: the place it writes to, one write, what must hold whenever it is killed.

Knows no processes. A writer counts what it has finished in `Writer.done`, which it shares with whoever kills
it.
"""

from __future__ import annotations

import json
import mmap
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attack import goods
from attack.beside import profile
from mars_export.calibration.tau import figure
from mars_export.calibration.tau import run as tau_run
from mars_export.calibration.tau.options import CalibrationOptions
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.exporter.tensorrt import engines
from mars_export.exporter.tensorrt.build import Built
from mars_export.exporter.tensorrt.plan import EngineOptions
from mars_export.runtime import Session
from mars_export.runtime.bundle import pack, prefixes, profiles
from mars_export.runtime.bundle.manifest import MANIFEST_FILE
from mars_export.runtime.bundle.open import CHECKSUM_FILE, open_bundle
from mars_export.runtime.bundle.prefixes import Made
from mars_export.runtime.bundle.profiles import sha256_of
from mars_export.runtime.bundle.stored import StoredPrefix
from mars_export.runtime.hub import Hub
from mars_export.runtime.prefix_maker import Beginning, make
from mars_export.runtime.warm import read, written

KEPT = "kept"  # a profile and a prefix that nobody touches
WORDS = (
    "hello",
    "the cat",
    "one",
    "in the end",
    "an apple",
    "er",
    "on",
    "a hat",
    "thin air",
    "then",
    "he",
    "ten",
)


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


class Profiles(InBundle):
    """`mars-export profiles`, and whatever else stores one: change after change, each numbered."""

    name = "profiles"

    def begin(self, _seed: int) -> None:
        self.done.value = 0
        if self._last():
            profiles.remove(self.bundle, "last")

    def write(self, seed: int, changes: int = 1_000_000) -> None:
        draw = random.Random(seed)
        for number in range(1, changes + 1):
            manifest = open_bundle(self.bundle).manifest
            known = [p.name for p in manifest.profiles if p.name.startswith("w")]
            if known and draw.random() < 0.4:
                profiles.remove(self.bundle, draw.choice(known))
            else:
                profiles.store(self.bundle, profile(manifest, f"w{draw.randrange(3)}", draw.randrange(500)))
            profiles.store(self.bundle, profile(manifest, "last", number))
            self.done.value = number

    def finish(self, seed: int) -> None:
        self.begin(seed)
        self.write(seed, 1)

    def wrong(self) -> Iterator[str]:
        yield from super().wrong()
        if self._last() not in (self.done.value, self.done.value + 1):
            yield f"change {self.done.value} was done, {self._last()} is there"

    def _last(self) -> int:
        manifest = open_bundle(self.bundle).manifest
        return next((p.evidence["num_rows"] for p in manifest.profiles if p.name == "last"), 0)


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


class Prefixes(InBundle):
    """`mars-export prefix`: by turns the command's own work, and storing and removing as fast as it can."""

    name = "prefix"

    def write(self, seed: int, changes: int = 1_000_000) -> None:
        draw = random.Random(seed)
        if seed % 2:
            self._make(draw)
            return
        made = [prefix(self.bundle, f"p{i % 3}", draw.randrange(1000)) for i in range(8)]
        for _ in range(changes):
            known = {p.name for p in open_bundle(self.bundle).manifest.prefixes} - {KEPT}
            if known and draw.random() < 0.4:
                prefixes.remove(self.bundle, draw.choice(sorted(known)))
            else:
                prefixes.store(self.bundle, [draw.choice(made)])

    def _make(self, draw: random.Random) -> None:
        session = Session.open(self.bundle, threads=1)
        text = "the man and the inner error of the other one in the end\n" * 4
        ids = Beginning.of_system(text).ids(session)
        make(session, f"p{draw.randrange(5)}", ids, sizes=[draw.choice((4, 7, 16))])

    def finish(self, _seed: int) -> None:
        self.write(0, 1)


class Calibrate(InBundle):
    """`mars-export calibrate` with a task of a few rows, gone on with after each kill."""

    name = "calibrate"

    def set_up(self) -> None:
        super().set_up()
        rows = [{"prompt": w, "answer": "", "metric": "contains", "max_new_tokens": 12} for w in WORDS]
        (self.home / "words.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def begin(self, seed: int) -> None:
        if seed % 3 == 0:  # others go on with what is there
            shutil.rmtree(self.home / "out", ignore_errors=True)

    def write(self, _seed: int) -> None:
        figure.save_png = lambda _calibration, path: path.write_bytes(b"")  # drawing takes a second
        options = CalibrationOptions(max_drop=0.4, taus=(0.999, 0.9, 0.5, 0.0), batch=4)
        request = tau_run.Request(
            self.bundle, str(self.home / "words.jsonl"), self.home / "out", threads=1, options=options,
            name="words", resume=True,
        )  # fmt: skip
        tau_run.run(request)

    def names(self) -> set[str]:
        out = {str(path.relative_to(self.home)) for path in (self.home / "out").rglob("*") if path.is_file()}
        return super().names() | {"words.jsonl"} | {name for name in out if "/." not in name}


class Export(Writer):
    """`mars-export onnx`, of a directory or a GGUF file, where nothing is and over a bundle."""

    name = "onnx"

    def set_up(self) -> None:
        goods.plain(self.home / "checkpoint")
        (self.home / "gguf").mkdir()
        goods.gguf_form(self.home / "gguf")
        self.before = {str(p.relative_to(self.home)) for p in self.home.rglob("*") if p.is_file()}
        self.is_there = False

    @property
    def out(self) -> Path:
        return self.home / "out"

    def begin(self, seed: int) -> None:
        if seed % 3 == 0:
            shutil.rmtree(self.out, ignore_errors=True)
        if seed % 5 == 0:
            shutil.rmtree(self.home.parent / "cache", ignore_errors=True)  # the GGUF file is converted again
        self.is_there = self.out.exists()

    def write(self, seed: int) -> None:
        source = self.home / ("checkpoint" if seed % 2 else "gguf/model.gguf")
        precision = random.Random(seed).choice(("fp32", "int8", "w8a8"))
        options = ExportOptions(block=2, precision=precision, oracle=False)
        export_onnx(open_checkpoint(str(source)), self.out, options, force=True)

    def wrong(self) -> Iterator[str]:
        if self.out.exists():
            open_bundle(self.out, full=True)
        elif self.is_there:
            yield "the old bundle is gone"

    def names(self) -> set[str]:
        return self.before | listed(self.out, self.home)


class Engines(InBundle):
    """`mars-export trt` on a bundle, in place and to a copy; TensorRT's own work is left out, which writes
    nothing.
    """

    name = "trt"

    def set_up(self) -> None:
        goods.plain(self.home.parent / "source")
        options = ExportOptions(
            block=4, precision="fp16", embedding="float", head="float", oracle=False, allow_drift=True
        )
        target = self.home.parent / "graphs"
        export_onnx(open_checkpoint(str(self.home.parent / "source")), target, options, force=True)
        shutil.rmtree(self.home.parent / "source")
        self.good = target
        super().set_up()

    def begin(self, seed: int) -> None:
        if seed % 3 == 0:
            shutil.rmtree(self.home / "copy", ignore_errors=True)
        self.is_there = (self.home / "copy").exists()

    def write(self, seed: int) -> None:
        engines._estimate = lambda *_: 0
        engines.tensorrt.build = _built
        bundle, options = open_bundle(self.bundle), EngineOptions("sm86", fixed=True, capacity=64)
        output = self.bundle if seed % 2 else self.home / "copy"
        engines.add_engine(bundle, output, replace(options, batch=1 + seed % 3), force=True)

    def wrong(self) -> Iterator[str]:
        yield from super().wrong()
        if (self.home / "copy").exists():
            open_bundle(self.home / "copy", full=True)
        elif self.is_there:
            yield "the old copy is gone"

    def names(self) -> set[str]:
        copy = self.home / "copy"
        return super().names() | (listed(copy, self.home) if copy.exists() else set())


def _built(*_: Any) -> Built:
    return Built(random.randbytes(300_000), "1.0", "12", 1.0, 1)


class Pack(Writer):
    """`mars-export pack` where nothing is and over a packed bundle."""

    name = "pack"

    def set_up(self) -> None:
        self.before = pack.pack(self.good, self.home.parent / "wanted", force=True)
        self.wanted = (self.home.parent / "wanted").read_bytes()

    def begin(self, seed: int) -> None:
        (self.home / "b.mars").unlink(missing_ok=True)
        self.old = b"an older one" if seed % 2 else None
        if self.old is not None:
            (self.home / "b.mars").write_bytes(self.old)

    def write(self, _seed: int) -> None:
        pack.pack(self.good, self.home / "b.mars", force=True)

    def wrong(self) -> Iterator[str]:
        there = (self.home / "b.mars").read_bytes() if (self.home / "b.mars").exists() else None
        if there not in (self.old, self.wanted):
            yield "half a file"

    def names(self) -> set[str]:
        return {"b.mars"}


class Unpack(Writer):
    """`mars-export unpack`."""

    name = "unpack"

    def set_up(self) -> None:
        pack.pack(self.good, self.home.parent / "packed", force=True)

    def begin(self, _seed: int) -> None:
        shutil.rmtree(self.home / "b", ignore_errors=True)

    def write(self, _seed: int) -> None:
        pack.unpack(self.home.parent / "packed", self.home / "b")

    def finish(self, seed: int) -> None:
        self.begin(seed)
        self.write(seed)

    def wrong(self) -> Iterator[str]:
        if (self.home / "b").exists():
            open_bundle(self.home / "b", full=True)
        yield from ()

    def names(self) -> set[str]:
        return listed(self.home / "b", self.home)


class Pull(Unpack):
    """`mars-export pull` from a hub on this machine, which must be at `url` by now."""

    name = "pull"
    url = ""

    def set_up(self) -> None:
        Hub(self.url).push(self.good, "somebody/bundle")

    def write(self, _seed: int) -> None:
        Hub(self.url).pull("somebody/bundle", self.home / "b")


WRITERS: dict[str, type[Writer]] = {
    w.name: w for w in (Export, Engines, Calibrate, Profiles, Prefixes, Pack, Unpack, Pull)
}
