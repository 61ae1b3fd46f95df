"""What changes a bundle that is there: profiles, prefixes, a calibration, engines."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attack import goods
from attack.beside import profile
from attack.writer import KEPT, InBundle, listed, prefix
from mars_export.calibration.tau import figure
from mars_export.calibration.tau import run as tau_run
from mars_export.calibration.tau.options import CalibrationOptions
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.exporter.tensorrt import engines
from mars_export.exporter.tensorrt.build import Built
from mars_export.exporter.tensorrt.plan import EngineOptions
from mars_export.runtime import Session
from mars_export.runtime.bundle import prefixes, profiles
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.prefix_maker import Beginning, make

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
