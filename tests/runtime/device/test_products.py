"""The check of byte products that the first w8a8 bundle of a process waits for."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from mars_export import SessionError
from mars_export.runtime.device.ort import kernels


def saturated(x: np.ndarray) -> np.ndarray:
    """Pairs of products are added in 16 bits, as by AVX2; one row alone is exact."""
    pairs = x.astype(np.int32)[:, :, None] * kernels.WEIGHTS.astype(np.int32)[None]
    if len(x) == 1:
        return pairs.sum(1)
    return np.clip(pairs.reshape(len(x), -1, 2, kernels.OUTPUTS).sum(2), -(2**15), 2**15 - 1).sum(1)


def test_the_products_of_this_machine_are_exact() -> None:
    onnx.checker.check_model(onnx.load_from_string(kernels.GRAPH + kernels.WEIGHTS.tobytes()))
    entries = kernels.exact_entries(onnxruntime, {"session.intra_op.allow_spinning": "0"})
    assert entries in ({}, kernels.UNSIGNED)


def test_wrong_products_are_avoided_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.inexact(saturated) == [2, 8]
    own = {"session.intra_op.allow_spinning": "0"}
    signed = tuple(own.items())
    monkeypatch.setattr(kernels, "_inexact", lambda _, settings: [2, 8] if settings == signed else [])
    assert kernels.exact_entries(onnxruntime, own) == kernels.UNSIGNED
    monkeypatch.setattr(onnxruntime, "__version__", "1.28.0")  # which would abort
    with pytest.raises(SessionError, match=r"install onnxruntime 1\.30 or newer, or mars-export-kernels"):
        kernels.exact_entries(onnxruntime, own)
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "_inexact", lambda *_: [2, 8])
    with pytest.raises(SessionError, match=r"wrong products .* steps of 2, 8 slots.* --precision int8"):
        kernels.exact_entries(onnxruntime, {})
