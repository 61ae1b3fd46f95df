"""benchmarks/lengths.py measures every bundle at every length, and draws it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.missing import need
from support.tiny import Named

need("matplotlib", "calibrate")

import lengths  # noqa: E402


def test_every_bundle_at_every_length(bundles: Named, tmp_path: Path) -> None:
    picture, figures = tmp_path / "lengths.png", tmp_path / "new" / "lengths.json"
    words = (bundles("llama"), bundles("qwen2"), "--lengths", 5, 300, "--tokens", 3, "--rounds", 2)
    lengths.main([*map(str, words), "--json", str(figures), "--picture", str(picture)])
    found = json.loads(figures.read_text())
    assert (found["rounds"], found["tokens"]) == (2, 3)
    assert list(found["bundles"]) == [bundles("llama").name, bundles("qwen2").name]
    for by_length in found["bundles"].values():
        assert list(by_length) == ["5", "300"]
        for values in by_length.values():
            assert 0 < values["smallest_ms_per_token"] <= values["ms_per_token"]
            assert values["prompt_tokens_per_second"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_only_the_tokens_behind_the_first_are_timed(bundles: Named) -> None:
    session = lengths.Session.open(bundles("llama"), threads=1, cache_bytes=0)
    cost = lengths.Cost()
    lengths.answer(session, 300, 4, cost)  # a prompt of two pieces
    assert (len(cost.prompt.wall), len(cost.step.wall)) == (1, 4)


def test_bundles_of_one_name_are_refused(bundles: Named, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lengths.main([str(bundles("llama")), str(bundles("llama"))])
    assert "two have the same one" in capsys.readouterr().err
