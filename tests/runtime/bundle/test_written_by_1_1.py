"""A bundle that the version before this format wrote: it opens, runs, and its profiles mean what
they meant.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.open import open_bundle

OLD = Path(__file__).parent / "written-by-1.1"
ANSWER = (129, 81, 75, 76, 121, 0, 74, 74)  # of the version that wrote it, one token a step, exact


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return shutil.copytree(OLD, tmp_path / "old.bundle")


def test_it_says_what_it_said() -> None:
    assert json.loads((OLD / "manifest.json").read_text())["format_version"] == "1.1"
    bundle = open_bundle(OLD, full=True)
    variant = bundle.variant("model")
    assert variant.quantization is not None
    assert (variant.precision, variant.quantization.group_size, variant.is_fixed) == ("int8", 32, False)
    assert profiles.find(bundle, variant, "full").window == "full"
    assert profiles.find(bundle, variant, "narrow").window == 2


def test_it_runs_as_it_ran() -> None:
    session = Session.open(OLD, threads=1, accuracy_level=0)
    answer = session.generate([5, 17, 99], GenerationConfig(tau=1.0, max_new_tokens=8, eos_ids=()))
    assert answer.token_ids == ANSWER


def test_it_can_be_changed_and_is_then_of_this_format(path: Path) -> None:
    before = open_bundle(path).manifest
    assert profiles.remove(path, "narrow") == 1
    after = open_bundle(path).manifest
    assert (before.format_version, after.format_version) == ("1.1", "1.2")
    assert after.variants == before.variants
    assert after.profiles == before.profiles[:1]
    assert '"block_size"' not in (path / "manifest.json").read_text()
