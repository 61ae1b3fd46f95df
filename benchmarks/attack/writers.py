"""What writes, command by command: bundles and files that are new; changes of a bundle are in changers.py."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from attack import goods
from attack.changers import Calibrate, Engines, Prefixes, Profiles
from attack.writer import Writer, listed
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.runtime.bundle import pack
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.hub import Hub


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
