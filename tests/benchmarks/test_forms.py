"""benchmarks/forms.py: every form runs, and the forms agree as far as they should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import forms


def test_products(tmp_path: Path) -> None:
    words = ("--layers", "1", "--rounds", "1", "--json", str(tmp_path / "out.json"))
    forms.main(["products", *words])
    found = json.loads((tmp_path / "out.json").read_text())["found"]
    assert list(found) == list(forms.FORMS)
    for form, figures in found.items():
        assert set(figures["ms_a_layer"]) == {"1", "2", "4", "8", "15", "64"}
        assert figures["error"] < (0.2 if "int4" in form else 0.05)
    assert found["w8a8, a scale for each row"]["steady"]
    assert not found["w8a8, one scale (DynamicQuantizeMatMul)"]["steady"]


def test_tails_agree() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (1, 3, forms.VOCAB)).astype(np.float32)
    found = []
    for form in forms.TAILS:
        found.append(forms.session(*forms.tail_graph(form), 1).session.run(None, {"raw": logits}))
    for token_ids, confidence in found:
        assert (token_ids == logits.argmax(-1)).all()
        np.testing.assert_allclose(confidence.reshape(1, 3), found[0][1].reshape(1, 3), rtol=1e-3)
