"""benchmarks/steps.py measures on tiny bundles: every command runs, and writes what its name says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Named

import steps


@pytest.fixture
def measured(tmp_path: Path) -> Any:
    def measure(*words: object) -> dict[str, Any]:
        steps.main([*map(str, words), "--json", str(tmp_path / "out.json")])
        return dict(json.loads((tmp_path / "out.json").read_text()))

    return measure


def test_cost(measured: Any, bundles: Named) -> None:
    found = measured("cost", bundles("llama"), bundles("qwen2"), "--rounds", 1, "--threads", 1)
    assert set(found["ms"]) == {bundles("llama").name, bundles("qwen2").name}
    for name in found["ms"]:
        assert set(found["ms"][name]["step"]) == {"1", "2", "4", "8", "15"}
        assert 0 < found["ms"][name]["host_share_one_token"] <= 1


def test_settings(measured: Any, bundles: Named) -> None:
    found = measured("settings", bundles("llama"), "--rounds", 1)["ms"]
    assert {"capacity 2048, 8 slots", "prefill of 480 by 480", "4 threads sleeping, 1 slots"} <= set(found)


def test_host_time_of_python_and_of_a_program(measured: Any, bundles: Named, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 50 200\necho 70 200\n")
    program.chmod(0o755)
    found = measured("host", bundles("llama"), "--program", program, "--rounds", 2, "--tokens", 6)
    assert found["C++"] == {"steps": 4, "outside_us": 60.0, "whole_us": 200.0, "share": 0.3}
    assert found["Python"]["steps"] == 2 * 5
    assert 0 < found["Python"]["share"] < 1


def test_one_token(measured: Any, checkpoints: Named, bundles: Named) -> None:
    found = measured("one-token", bundles("qwen2"), checkpoints("qwen2"), "--rounds", 1)
    assert found["ratio"] > 0
    assert len(found["median_ms"]) == 2


def test_windows_by_the_clock_and_replayed(measured: Any, bundles: Named) -> None:
    words = (bundles("llama"), "--rows", 1, "--taus", 0.5)
    for found in (measured("window", *words, "--rounds", 1), measured("replay", *words)):
        assert [each["task"] for each in found["results"]] == ["assistant", "arithmetic", "chat"]
        for each in found["results"]:
            assert list(each["ms_per_token"]) == ["1", "2", "3", "4", "6", "8", "auto"]


def test_what_goes_together(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["cost", "b", "--genai", "python"], "go together"),
        (["host", "b", "--program", "/no/such/program"], "`make cpp` builds it"),
    ):
        with pytest.raises(SystemExit):
            steps.main(words)
        assert said in capsys.readouterr().err
