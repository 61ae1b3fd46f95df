"""Rotary frequencies of a model's config.

Knows the `rope_parameters` / `rope_scaling` dialects; the graph only sees numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...runtime.errors import CheckpointError
from .tensors import shown

# `dynamic` changes nothing within the trained context, and a bundle never goes beyond that.
KNOWN = ("default", "dynamic", "linear", "llama3", "yarn")
SMALLEST, LARGEST = 1e-38, 1e38  # of a number in a config
LONGEST_CONTEXT = 2**31


@dataclass(frozen=True, slots=True)
class Rope:
    """`inv_freq`: float32 [rotary_dim / 2]; cos and sin are multiplied by `scale` (yarn's attention factor,
    else 1).

    `context`: positions that the scaling was made for, 0 where it says nothing beyond
    max_position_embeddings.
    """

    inv_freq: np.ndarray
    scale: float
    context: int = 0


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read the rotary embedding of a Hugging Face config (version 4 `rope_scaling` or version 5
    `rope_parameters`).

    Raises CheckpointError, naming the type, for one that we do not compute (longrope, ...).
    """
    params = _object(config, "rope_scaling") | _object(config, "rope_parameters")
    if nested := [name for name, value in params.items() if isinstance(value, Mapping)]:
        raise CheckpointError(
            f"config.json: rope parameters of their own for {', '.join(map(str, nested[:3]))} are not"
            " supported"
        )
    theta = next(
        (
            positive(source, "rope_theta")
            for source in (params, config)
            if source.get("rope_theta") is not None
        ),
        10000.0,
    )
    kind = str(params.get("rope_type") or params.get("type") or "default")
    if kind not in KNOWN:
        raise CheckpointError(
            f"config.json: rope type `{kind[:80]}` is not supported (known: {', '.join(KNOWN)})"
        )
    if theta == 1:
        raise CheckpointError(
            "config.json: `rope_theta` must be other than 1: all positions would be the same"
        )
    if any(source.get("partial_rotary_factor") not in (None, 1) for source in (params, config)):
        raise CheckpointError("config.json: `partial_rotary_factor` other than 1 is not supported")
    powers = _powers(theta, head_dim)
    inv_freq = np.float32(1) / powers
    try:
        if kind == "linear":
            return Rope(inv_freq / np.float32(positive(params, "factor")), 1.0)
        if kind == "llama3":
            return Rope(_llama3(inv_freq, params), 1.0)
        if kind == "yarn":
            return _yarn(powers, params, theta, head_dim, positive(config, "max_position_embeddings"))
    except KeyError as error:
        raise CheckpointError(f"config.json: rope type `{kind}` needs the parameter {error}") from error
    return Rope(inv_freq, 1.0)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2 i / head_dim) in float32, rounded as torch does: models were trained with just these."""
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    powers: np.ndarray = (theta**exponents).numpy()
    return powers


def positive(values: Mapping[str, Any], name: str) -> float:
    """A positive, finite number of a config.

    Raises KeyError when it is absent, CheckpointError when it is something else.
    """
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST < value < LARGEST:
        raise CheckpointError(f"config.json: `{name}` must be a positive number, not {shown(value)}")
    return float(value)


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: `{name}` must be an object, not {shown(value)}")
    return dict(value or {})


def _llama3(inv_freq: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    factor, old = positive(params, "factor"), positive(params, "original_max_position_embeddings")
    low, high = positive(params, "low_freq_factor"), positive(params, "high_freq_factor")
    if not low < high:
        raise CheckpointError(
            f"config.json: `high_freq_factor` must be above `low_freq_factor`, not {high} and {low}"
        )
    import torch

    freq = torch.from_numpy(inv_freq)
    wavelength = 2 * math.pi / freq
    slow = torch.where(wavelength > old / low, freq / factor, freq)
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * slow / factor + smooth * slow
    between = (wavelength >= old / high) & (wavelength <= old / low)
    rotated: np.ndarray = torch.where(between, blended, slow).numpy()
    return rotated


def _yarn(powers: np.ndarray, params: Mapping[str, Any], theta: float, head_dim: int, context: float) -> Rope:
    old = (
        positive(params, "original_max_position_embeddings")
        if params.get("original_max_position_embeddings")
        else context
    )
    factor = positive(params, "factor")
    beta_fast, beta_slow = (
        positive(params, name) if params.get(name) else usual
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    rest = 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    blended = 1 / (factor * powers) * (1 - rest) + 1 / powers * rest
    return Rope(
        blended.astype(np.float32), _yarn_scale(params, factor), int(min(factor * old, LONGEST_CONTEXT))
    )


def _yarn_scale(params: Mapping[str, Any], factor: float) -> float:
    def mscale(value: float, weight: float = 1.0) -> float:
        return 1.0 if value <= 1 else 0.1 * weight * math.log(value) + 1.0

    if params.get("attention_factor") is not None:
        return positive(params, "attention_factor")
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(factor, positive(params, "mscale")) / mscale(factor, positive(params, "mscale_all_dim"))
    return mscale(factor)
