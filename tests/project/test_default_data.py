"""The default checkpoint's data: committed rows are what the generators write, and new to training."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "default-checkpoint"
TASKS = ("assistant", "arithmetic")


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    before = set(sys.modules)
    module = importlib.import_module("dataset")
    yield module
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def prompts(task: str, split: str) -> set[str]:
    folder = ROOT / "calibration" / "tasks" / "data" if split == "calibration" else EXAMPLE / "data"
    lines = (folder / f"{task}.{split}.jsonl").read_text().splitlines()
    return {json.loads(line)["messages"][-1]["content"] for line in lines}


def test_committed_rows_are_what_the_generators_write(dataset: ModuleType, tmp_path: Path) -> None:
    built_in = tmp_path / "built-in"
    built_in.mkdir()
    dataset.write_held_out(tmp_path, built_in)
    written = sorted(path for path in tmp_path.glob("**/*") if path.is_file())
    assert len(written) == 7
    for path in written:
        committed = dataset.BUILT_IN if path.parent == built_in else EXAMPLE / "data"
        assert path.read_bytes() == (committed / path.name).read_bytes(), path.name


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_large_and_apart(task: str) -> None:
    test, calibration = prompts(task, "test"), prompts(task, "calibration")
    assert min(len(test), len(calibration)) >= 500
    assert not test & calibration


@pytest.mark.parametrize("task", TASKS)
def test_training_draws_use_other_wordings(dataset: ModuleType, task: str) -> None:
    held_out = prompts(task, "test") | prompts(task, "calibration")
    trained = {
        example.messages[-1][1] for example in islice(dataset.examples(task, "train-0", held_out=False), 3000)
    }
    assert len(trained & held_out) <= 3  # the mixture drops even these


def test_training_has_no_held_out_small_talk(dataset: ModuleType) -> None:
    held_out = {dataset.smalltalk.plain(said) for said, _ in dataset.smalltalk.held_out()}
    drawn = islice(dataset.examples("smalltalk", "train-0", held_out=False), 3000)
    assert len(held_out) == 50 and not held_out & {dataset.smalltalk.plain(e.messages[-1][1]) for e in drawn}
