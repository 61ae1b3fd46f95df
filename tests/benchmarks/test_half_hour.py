"""What is carried to a GPU's machine, and stages there that end with what they have."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gpu_pack
import pytest
from support.shell import call
from support.tiny import Named

from gpu import half_hour, models


def test_a_library_keeps_the_device_code_of_one_architecture() -> None:
    def entry(kind: int, arch: int, code: bytes) -> bytes:
        header = struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", arch)
        return header.ljust(64, b"\0") + code

    def library(old: bytes) -> bytes:
        entries = entry(2, 80, old) + entry(2, 90, b"kept" * 4) + entry(1, 80, old)
        return b"host code" + gpu_pack.FATBIN + struct.pack("<HHQ", 1, 16, len(entries)) + entries + b"data"

    assert gpu_pack.trimmed(library(b"old!" * 8), 90) == library(bytes(32))


def test_pieces_are_small_and_a_parcel_waits_for_all_of_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = b"".join(i.to_bytes(2, "little") for i in range(30_000))
    monkeypatch.setattr(gpu_pack, "CHUNK", 40_000)
    monkeypatch.setattr(gpu_pack, "members", lambda parcel, *_: [(f"{parcel}.txt", noise, parcel == "base")])
    gpu_pack.pack(tmp_path / "out", 90, 45_000, "3.12")
    pieces = sorted((tmp_path / "out").iterdir())
    assert len(pieces) > 1
    assert all(sum(p.stat().st_size for p in piece.iterdir()) <= 45_000 for piece in pieces)
    for piece in pieces:
        for path in piece.iterdir():
            path.rename(tmp_path / path.name)
        gpu_pack.unpack(tmp_path, tmp_path / "into")
    for parcel in gpu_pack.PARCELS:
        assert (tmp_path / "into" / parcel / f"{parcel}.txt").read_bytes() == noise
    assert (tmp_path / "into" / "base" / "base.txt").stat().st_mode & 0o100
    assert "to come" in capsys.readouterr().out


def test_a_program_is_carried_with_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama-server", "libserver-impl.so", "libggml.so.0.1", "notes.txt"):
        (tmp_path / name).write_text(name)
    for name in ("libggml.so.0", "libggml.so"):
        (tmp_path / name).symlink_to("libggml.so.0.1")
    monkeypatch.setattr(gpu_pack, "LLAMA_BUILT", tmp_path)
    carried = {name: content for name, content, _ in gpu_pack.members("llama", 90, "3.12")}
    assert carried.pop("bin/libggml.so.0") == b"libggml.so.0.1"
    assert sorted(carried) == ["bin/libserver-impl.so", "bin/llama-server"]


def test_a_stage_goes_on_after_an_error_and_ends_with_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[half_hour.Row]:
        yield {"rows": 1}
        raise models.MissingError("no | file")

    monkeypatch.setenv("OUT", str(tmp_path))
    half_hour.take("steps", [("a", broken), ("b", lambda: iter([{"rows": 8, "ms": 1.5}]))], 60)
    tables = capsys.readouterr().out.partition("| rows |")[2]
    assert "| a | MissingError: no / file |" in tables and "| 8 | 1.5 |" in tables
    kept = json.loads((tmp_path / "steps.json").read_text())
    assert [row.get("rows") for row in kept] == [1, None, 8, None] and kept[-1]["end"] == "complete"


def test_a_stage_that_hangs_is_ended_with_what_it_has(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); from gpu import half_hour as h, models\n"
        "def part():\n    yield {'row': 1}\n    h.ran(['sleep', '60'], 'sleep')\n"
        f"models.WORK = h.WORK = h.Path({str(tmp_path)!r}); h.take('steps', [('a', part)], 0.5)"
    )
    done = call("python3", "-c", code)
    assert done.returncode == 3 and "out of time" in done.stdout and "| row |" in done.stdout


def test_steps_of_every_shape_are_compared(bundles: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_hour, "bundle", lambda *_: bundles("qwen2"))
    rows = list(half_hour.captured("tiny", "fp32", "cpu"))
    assert [(row["rows"], row["slots"]) for row in rows] == [*half_hour.STEP_SHAPES] * 2
    assert {row["bits as eager"] for row in rows} == {f"{half_hour.STEPS} of {half_hour.STEPS}"}
    assert max(float(row["first slot apart from 1 x 1"]) for row in rows) < 1e-4


def test_stages_are_those_of_the_description() -> None:
    known = half_hour.stages("cuda", Path("/tmp"))
    assert [line.split()[0] for line in (half_hour.__doc__ or "").splitlines() if "  " in line.strip()] == [
        *known
    ]
    assert all(isinstance(part, partial) or callable(part) for parts in known.values() for _, part in parts)
