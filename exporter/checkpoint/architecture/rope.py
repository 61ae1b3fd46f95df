"""Rotary frequencies from the `rope_parameters` or `rope_scaling` of a model's config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....runtime.errors import CheckpointError
from ..tensors import shown

# `dynamic` has no effect within the trained context, which a bundle never exceeds.
KNOWN = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
OLD_NAMES = {"su": "longrope"}
SMALLEST, LARGEST = 1e-38, 1e38  # of a number in a config
LONGEST_CONTEXT = 2**31


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding."""

    inv_freq: np.ndarray  # float32 [rotary_dim / 2]
    scale: float  # factor of cos and sin: yarn's attention factor, else 1
    context: int = 0  # positions that the scaling supports; 0: max_position_embeddings
    limit: int = 0  # positions beyond which the model uses other frequencies; 0: none


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a config: version 4's `rope_scaling` or version 5's `rope_parameters`."""
    return _object(config, "rope_scaling") | _object(config, "rope_parameters")


def rope_from_config(
    config: Mapping[str, Any], head_dim: int, *, partial: bool = False, long: bool = False
) -> Rope:
    """Read the rotary embedding of a Hugging Face config.

    `partial`: the family supports `partial_rotary_factor`. `long`: use longrope's frequencies for texts
    beyond the original context. Raises CheckpointError for an unsupported type.
    """
    params = rope_parameters(config)
    if nested := [name for name, value in params.items() if isinstance(value, Mapping)]:
        raise CheckpointError(
            f"config.json: separate rope parameters for {', '.join(map(str, nested[:3]))} are not supported"
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
    kind = OLD_NAMES.get(kind, kind)
    if kind not in KNOWN:
        raise CheckpointError(
            f"config.json: rope type `{kind[:80]}` is not supported (known: {', '.join(KNOWN)})"
        )
    if theta == 1:
        raise CheckpointError("config.json: `rope_theta` must not be 1: all positions would be the same")
    size = _rotary_size(params, config, head_dim, partial)
    if config.get("original_max_position_embeddings") is not None:  # it overrides the parameters
        params["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if long and kind != "longrope":
        raise CheckpointError(
            f"config.json: rope type `{kind}` has no separate frequencies for long texts: leave out"
            " --long-context"
        )
    try:
        if kind == "dynamic" and params.get("alpha") is not None:
            theta *= positive(params, "alpha") ** (size / (size - 2)) if size > 2 else 1.0
        powers = _powers(theta, size)
        inv_freq = np.float32(1) / powers
        if kind == "linear":
            return Rope(inv_freq / np.float32(positive(params, "factor")), 1.0)
        if kind == "llama3":
            return Rope(_llama3(inv_freq, params), 1.0)
        if kind == "longrope":
            return _longrope(powers, params, positive(config, "max_position_embeddings"), long)
        if kind == "yarn":
            return _yarn(powers, params, theta, size, positive(config, "max_position_embeddings"))
    except KeyError as error:
        raise CheckpointError(f"config.json: rope type `{kind}` needs the parameter {error}") from error
    return Rope(inv_freq, 1.0)


def _rotary_size(
    params: Mapping[str, Any], config: Mapping[str, Any], head_dim: int, is_partial: bool
) -> int:
    """The number of values of a head that are rotated."""
    name = "partial_rotary_factor"
    factor = next((positive(s, name) for s in (params, config) if s.get(name) is not None), 1.0)
    if factor == 1:
        return head_dim
    size = int(head_dim * factor)
    if not is_partial or factor > 1 or size < 2 or size % 2:
        raise CheckpointError(
            f"config.json: `{name}` {factor:g} of heads of {head_dim} is not supported for this architecture"
        )
    return size


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2 i / head_dim) in float32, rounded as in torch, with which models are trained."""
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    powers: np.ndarray = (theta**exponents).numpy()
    return powers


def positive(values: Mapping[str, Any], name: str) -> float:
    """A positive, finite number of a config.

    Raises KeyError if it is absent, CheckpointError if it is anything else.
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


def _longrope(powers: np.ndarray, params: Mapping[str, Any], context: float, long: bool) -> Rope:
    import torch

    old = (
        positive(params, "original_max_position_embeddings")
        if params.get("original_max_position_embeddings") is not None
        else context
    )
    name = "long_factor" if long else "short_factor"
    factors = params[name]
    if not isinstance(factors, list) or len(factors) != len(powers):
        raise CheckpointError(f"config.json: `{name}` must be a list of {len(powers)} numbers")
    parts = [positive({name: factor}, name) for factor in factors]
    factor = context / old if params.get("factor") is None else positive(params, "factor")
    if params.get("attention_factor") is not None:
        scale = positive(params, "attention_factor")
    else:
        scale = 1.0 if factor <= 1 or old <= 1 else math.sqrt(1 + math.log(factor) / math.log(old))
    scaled = torch.tensor(parts, dtype=torch.float32) * torch.from_numpy(powers)
    return Rope((1.0 / scaled).numpy(), scale, limit=0 if long else int(min(old, LONGEST_CONTEXT)))


def _yarn(powers: np.ndarray, params: Mapping[str, Any], theta: float, head_dim: int, context: float) -> Rope:
    old = (
        positive(params, "original_max_position_embeddings")
        if params.get("original_max_position_embeddings")
        else context
    )
    factor = positive(params, "factor")
    beta_fast, beta_slow = (
        positive(params, name) if params.get(name) else default
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
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
