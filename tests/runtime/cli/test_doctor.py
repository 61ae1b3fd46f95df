"""What doctor says of a device: the same checks on the CPU, and a device that computes something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.paths import ROOT

from mars_export.runtime.cli import doctor
from mars_export.runtime.cli.doctor import proof


def test_a_right_device(sessions: Sessions) -> None:
    findings = proof(sessions(MAIN), sessions(MAIN), "variant model")
    assert [(f.subject.removeprefix("variant model, "), f.state) for f in findings] == [
        ("tokens", "good"),
        ("exact", "good"),
        ("steps", "good"),
    ]
    assert findings[0].detail == "8 of 8 answers as on the CPU"
    assert proof(sessions(MAIN), None, "x")[0].state == "absent"


def test_a_device_with_other_tokens(sessions: Sessions) -> None:
    assert proof(sessions(MAIN), sessions("llama"), "x")[0].state == "bad"


def test_two_packages_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same files, so that the one installed last decides whether there is CUDA."""
    monkeypatch.setattr(doctor, "_version", lambda _: "1.32.0")
    for devices, state in ((["cpu", "cuda"], "good"), (["cpu"], "bad")):
        monkeypatch.setattr(doctor, "version_and_devices", lambda devices=devices: ("1.32.0", devices))
        finding = doctor._onnxruntime()
        assert finding.state == state
        assert "onnxruntime and onnxruntime-gpu are installed" in finding.detail
        assert "pip install --force-reinstall --no-deps onnxruntime-gpu" in finding.detail
    monkeypatch.setattr(doctor, "_version", lambda name: "1.32.0" if name == "onnxruntime" else None)
    assert doctor._onnxruntime() == doctor.Finding("onnxruntime", "good", "1.32.0")


def test_libmars_says_which_onnxruntime_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._libmars().state == "absent"
    package = Path(shutil.copytree(ROOT / "runtime/cpp/mars_export_cpp", tmp_path / "mars_export_cpp"))
    (package / "bin").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._libmars().state == "bad", "it has no mars-run"
    program = package / "bin/mars-run"
    program.write_text("#!/bin/sh\necho mars-run 0.1.0\necho ONNX Runtime 1.32.0, /x/libonnxruntime.so.1\n")
    program.chmod(0o755)
    finding = doctor._libmars()
    assert (finding.state, finding.detail) == (
        "good",
        "mars-run 0.1.0; ONNX Runtime 1.32.0, /x/libonnxruntime.so.1",
    )
