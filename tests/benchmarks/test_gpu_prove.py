"""The run on a GPU's machine: what a step says of itself becomes a page, failures and absences included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_pack
import gpu_prove
import pytest
from gpu_prove import Result, Step, page, steps, take
from support.shell import call
from support.tiny import Named

from gpu import libmars, speed
from mars_export import Session


@pytest.fixture(autouse=True)
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_prove, "BUILD", tmp_path)
    return tmp_path


def ran(name: str, code: str, **options: Path) -> Result:
    return take(name, Step("a step", (sys.executable, "-c", code), **options), {})


def test_a_step_passes_fails_or_is_not_run(build: Path) -> None:
    assert ran("speed", "print('{\"tokens\": 3}')").figures == {"tokens": 3}
    failed = ran("speed", "print('first'); raise SystemExit('no | memory')")
    assert (failed.state, failed.detail) == ("failed", "no | memory")
    assert ran("speed", "", needs=build / "absent").detail == "absent is not there"
    assert ran("speed", "raise SystemExit(1)", makes=build).detail == "there already"
    assert take("cpp", Step("a step", ("/no/such/program",)), {}).state == "not run"


def test_skipped_tests_are_no_proof() -> None:
    assert ran("tests", "print('26 skipped, 134 deselected in 3.28s')").state == "not run"
    assert ran("tests", "print('26 passed, 1 skipped in 3.28s')").state == "passed"


def test_libmars_that_was_not_brought_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("cpp", "print('skipped: no GPU'); raise SystemExit(77)").detail == "skipped: no GPU"
    assert ran("cpp", "raise SystemExit(77)").state == "not run"
    assert ran("speed", "raise SystemExit(77)").state == "failed"
    command = [libmars.__file__, str(tmp_path), "--joined", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert libmars.main() == libmars.SKIPPED
    assert "gpu_pack.py brings them" in capsys.readouterr().out


@pytest.mark.parametrize(("codes", "whole"), [((0, 77), 0), ((77, 77), 77), ((0, 1), 1), ((77, 2), 2)])
def test_libmars_that_was_brought_is_run_with_the_wheels_library(
    codes: tuple[int, int], whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cpp"
    folder.mkdir()
    for name, code in zip(libmars.PROGRAMS, codes, strict=True):
        words = f'#!/bin/sh\necho "$MARS_GPU_BUNDLE:$MARS_ONNXRUNTIME" > $0.said\nexit {code}\n'
        (folder / name).write_text(words)  # brought without its mode
    monkeypatch.setattr(sys, "argv", ["libmars.py", "a.bundle", "--joined", str(tmp_path)])
    assert libmars.main() == whole
    said = (folder / f"{libmars.PROGRAMS[0]}.said").read_text()
    bundle, place = said.strip().split(":")
    assert bundle == "a.bundle" and list(Path(place).glob("libonnxruntime.so.1*"))


def test_a_pack_has_the_programs_that_were_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "ROOT", tmp_path)
    assert gpu_pack.programs() == []
    folder = tmp_path / "build" / "cpp" / "release" / "tests"
    folder.mkdir(parents=True)
    (folder / "mars-gpu-ort").touch()
    (folder / "mars-tests").touch()
    assert [path.name for path in gpu_pack.programs()] == ["mars-gpu-ort"]


def test_a_step_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_prove, "LIMIT", 0.5)
    hung = ran("speed", "import time; time.sleep(60)")
    assert (hung.state, hung.detail) == ("failed", "over 0.5 s")


def test_the_page_has_every_step_and_a_table_of_speeds() -> None:
    row = ["fp16", "float16", "1", "exact", "900", "12.0", "2.10"]
    results = [
        Result("tests", "tests", "passed", "26 passed", 3.0),
        Result("doctor-fp16", "fp16", "failed", "1 | failed", 2.0),
        Result("speed-fp16", "fp16", "passed", "{}", 2.0, {"rows": [row]}),
    ]
    text = page("NVIDIA X, 580.1, 9.0", results)
    assert "| fp16 | float16 | 1 | exact | 900 | 12.0 | 2.10 |" in text
    assert "| doctor-fp16: fp16 | **failed** | 1 / failed | 2 |" in text
    assert "| speed-fp16: fp16 | passed | 1 rows above | 2 |" in text


def test_speeds_of_a_bundle(bundles: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "BATCHES", (1, 2, 4))
    rows = speed.measured(Session.open(bundles("qwen2"), threads=1, cache_bytes=0), "tiny", 2)
    assert [row[2:4] for row in rows] == [[b, m] for b in ("1", "2") for m in speed.MODES]
    assert [row[6] for row in rows if row[3] == "one token"] == ["1.00", "1.00"]


def test_every_command_of_ours_is_one_that_exists() -> None:
    names = {step.command[3] for step in steps("cuda").values() if step.command[1] == "-c"}
    assert names == {"onnx", "doctor"}
    known = call(sys.executable, gpu_prove.__file__, "--list", check=True).stdout
    assert [line.split()[0] for line in known.splitlines()] == list(steps("cuda"))


def test_json_of_a_result_is_read_again() -> None:
    one = Result("a", "b", "passed", "c", 1.0, {"d": 1})
    assert Result(**json.loads(json.dumps(gpu_prove.asdict(one)))) == one
