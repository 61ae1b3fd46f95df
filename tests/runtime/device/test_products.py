"""The check of byte products that the first w8a8 bundle of a process waits for."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from support.paths import ROOT

from mars_export import SessionError
from mars_export.runtime.device.ort import products


def saturated(x: np.ndarray) -> np.ndarray:
    """Pairs of products are added in 16 bits, as by AVX2; one row alone is exact."""
    pairs = x.astype(np.int32)[:, :, None] * products.WEIGHTS.astype(np.int32)[None]
    if len(x) == 1:
        return pairs.sum(1)
    return np.clip(pairs.reshape(len(x), -1, 2, products.OUTPUTS).sum(2), -(2**15), 2**15 - 1).sum(1)


def test_the_products_of_this_machine_are_exact() -> None:
    onnx.checker.check_model(onnx.load_from_string(products.GRAPH + products.WEIGHTS.tobytes()))
    entries = products.exact_entries(onnxruntime, {"session.intra_op.allow_spinning": "0"})
    assert entries in ({}, products.UNSIGNED)


def test_wrong_products_are_avoided_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.inexact(saturated) == [2, 8]
    own = {"session.intra_op.allow_spinning": "0"}
    signed = tuple(own.items())
    monkeypatch.setattr(products, "_inexact", lambda _, settings: [2, 8] if settings == signed else [])
    assert products.exact_entries(onnxruntime, own) == products.UNSIGNED
    monkeypatch.setattr(products, "_inexact", lambda *_: [2, 8])
    with pytest.raises(SessionError, match=r"wrong products .* steps of 2, 8 slots.* --precision int8"):
        products.exact_entries(onnxruntime, {})


def test_libmars_multiplies_the_same() -> None:
    source = (ROOT / "runtime/cpp/src/device/ort/products.cpp").read_text()
    assert bytes.fromhex("".join(re.findall(r"0x([0-9A-F]{2})", source))) == products.GRAPH
    assert f"inputs = {products.INPUTS}, outputs = {products.OUTPUTS};" in source
    assert f"largest = {products.LARGEST};" in source
