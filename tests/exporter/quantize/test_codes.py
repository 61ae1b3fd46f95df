"""The codes of quantized weights against plain arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from mars_export.exporter.codes import Codec, Quantization, pack

FP32, FP16 = np.dtype(np.float32), np.dtype(np.float16)
CODECS = (
    [Codec("int8", None)]
    + [
        Codec(kind, size, symmetric)
        for kind in ("int4", "int8")
        for size in (16, None)
        for symmetric in (True, False)
    ]
    + [Codec("int4", 16, symmetric=False, multiplied=True)]
)


def codec_id(codec: Codec) -> str:
    kind = codec.kind if codec.symmetric else codec.dtype
    return f"{kind}-{codec.group_size}" + ("-multiplied" if codec.multiplied else "")


@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
def test_every_number_is_within_half_a_step_of_its_code(codec: Codec) -> None:
    weight = np.random.default_rng(0).normal(0.01, 0.05, (24, 48)).astype(np.float32)
    made = codec.encode(weight, FP32)
    error = np.abs(made.decoded().reshape(weight.shape) - weight).reshape(24, codec.num_groups(48), -1)
    # A zero point is rounded too: with it the ends of the range may be another half step away.
    assert (error <= made.units[..., None] * (0.5 if codec.symmetric else 1.0) * 1.0001).all()
    assert made.codes.min() >= codec.lowest
    assert made.codes.max() <= codec.highest


@given(
    st.lists(st.floats(-65504, 65504, width=16), min_size=16, max_size=16),
    st.sampled_from(CODECS),
    st.sampled_from([FP32, FP16]),
)
def test_whatever_the_numbers_nothing_becomes_infinite(
    values: list[float], codec: Codec, scale_dtype: np.dtype[Any]
) -> None:
    weight = np.array([values], np.float32)
    made = codec.encode(weight, scale_dtype)
    assert np.isfinite(made.scales).all()
    span = max(float(np.abs(weight).max()), 1e-6)
    assert np.abs(made.decoded().reshape(1, 16) - weight).max() <= 0.5 * span


@pytest.mark.parametrize("inputs", [32, 576, 4416, 8960, 18944, 262144])
def test_no_sum_of_multiplied_codes_overflows(inputs: int) -> None:
    """Of the largest activations with weights of any codes."""
    codec, weight = Quantization("w4a8").linear, np.zeros((1, inputs), np.float32)
    weight[0, ::32] = np.linspace(1, 1000, inputs // 32)
    made = codec.encode(weight, FP32)
    assert made.multipliers is not None and made.multipliers.min() >= 1
    assert made.multipliers.max() == codec.max_multiplier(inputs)
    assert inputs * 127 * codec.highest * int(made.multipliers.max()) < 2**31


def test_a_block_of_zeros_stays_zero() -> None:
    for codec in CODECS:
        assert (codec.encode(np.zeros((2, 32), np.float32), FP32).decoded() == 0).all()


@pytest.mark.parametrize(
    ("dtype", "kind"), [("int4", onnx.TensorProto.INT4), ("uint4", onnx.TensorProto.UINT4)]
)
def test_packed_codes_are_what_onnx_reads(dtype: str, kind: int) -> None:
    low = -8 if dtype == "int4" else 0
    codes = np.arange(low, low + 15, dtype=np.int8 if low else np.uint8).reshape(3, 5)
    tensor = onnx.TensorProto(data_type=kind, dims=codes.shape, raw_data=pack(codes, dtype))
    assert (numpy_helper.to_array(tensor).astype(np.int8) == codes.astype(np.int8)).all()
