"""The training forward of examples/gated computes what a draft adapter does in transformers."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from support import gated, tiny
from support.paths import ROOT


def test_training_computes_the_drafts_of_the_gated_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.Tiny("llama-drafts", "llama", tied=True)
    base = tiny.write(made, tmp_path / "base")
    tiny.change_config(base, rope_theta=10000.0)
    adapter = gated.write_adapter(base, tmp_path / "adapter", made)
    oracle = gated.GatedOracle(made, base, [adapter])
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gated"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "default-checkpoint"))
    train = importlib.import_module("train")
    model = train.Drafter(base, 4, 8, torch.float32)
    train.start_from(model, adapter, 4)
    row = train.Row([5, 17, 99, 4, 61, 30, 77, 8], 3, [3, 5, 6])
    with torch.inference_mode():
        drafts = model.drafts([row, train.Row([*range(20, 32)], 1, [1, 9])]).numpy()
    for number, start in enumerate(row.starts):
        slots = [tiny.VOCAB_SIZE + train.MASK_ID] * train.DRAFTS
        expected = oracle.logits(row.tokens[:start] + slots)[start:]
        made_here = drafts[number * train.DRAFTS : (number + 1) * train.DRAFTS]
        np.testing.assert_allclose(made_here, expected, atol=2e-4)
