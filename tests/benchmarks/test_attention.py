"""benchmarks/attention.py: the forms compute one thing, those of the exporter to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import attention


def test_forms_agree(tmp_path: Path) -> None:
    words = ["--lengths", "256", "512", "--slots", "2", "70", "--layers", "2", "--rounds", "1", "--json"]
    attention.main([*words, str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["found"]
    assert list(found) == ["256", "512"]
    for forms in found.values():
        assert list(forms) == list(attention.FORMS)
        for name, figures in forms.items():
            assert set(figures["ms_a_layer"]) == {"2", "70"}
            assert figures["differs_by"] <= (0 if name in ("truths", "rows", "heads") else 1e-6)


def test_lengths_are_whole_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main(["--lengths", "512", "500"])
    assert "multiples of 256, not 500" in capsys.readouterr().err
