"""The sliding window and the rotary embedding of each layer, from the dialects of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....runtime.errors import CheckpointError
from ....runtime.rules import is_integer
from ..tensors import shown
from .families import Family
from .rope import Rope, rope_from_config, rope_parameters

SLIDING, FULL = "sliding_attention", "full_attention"


def windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens; None for full causal attention."""
    slides = family.windows != "no layer" and (
        config.get("sliding_window") is not None or family.rope_by_kind
    )
    if not slides or (family.windows == "flagged" and not config.get("use_sliding_window")):
        return (None,) * num_layers
    kinds = [SLIDING] * num_layers if family.windows == "all" else _kinds(config, family, num_layers)
    window = _whole(config, "sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _kinds(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None and family.unrotated == "listed":
        kinds = [FULL if rotates else SLIDING for rotates in _listed(config, num_layers)]
    elif kinds is None and family.windows == "typed":
        every = _whole(config, "sliding_window_pattern")
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(num_layers)]
    elif kinds is None:
        first = _whole(config, "max_window_layers") if config.get("max_window_layers") else 0
        kinds = [SLIDING if i >= first else FULL for i in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (SLIDING, FULL) for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json: `layer_types` must name {FULL} or {SLIDING} for each of {num_layers} layers"
        )
    return kinds


def rotations(
    config: Mapping[str, Any], family: Family, head_dim: int, windows: tuple[int | None, ...], long: bool
) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
    """The rotary embeddings of a model, and for each layer the index of its own; None if it has none."""
    if family.rope_by_kind:
        both = tuple(rope_from_config(_of_kind(config, kind), head_dim) for kind in (FULL, SLIDING))
        return both, tuple(int(window is not None) for window in windows)
    rope = rope_from_config(config, head_dim, partial=family.partial_rotary, long=long)
    if family.unrotated == "listed":
        flags = _listed(config, len(windows))
    else:
        slides = config.get("sliding_window") is not None
        flags = [family.unrotated != "full" or not slides or window is not None for window in windows]
    return (rope,), tuple(0 if rotates else None for rotates in flags)


def _of_kind(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config for layers of one kind. Sliding layers have a separate base, to which version 4's scaling
    does not apply.
    """
    params, rest = rope_parameters(config), {k: v for k, v in config.items() if k != "rope_scaling"}
    if any(name in params for name in (FULL, SLIDING)):
        default = {FULL: 1e6, SLIDING: 1e4}[kind]
        return rest | {"rope_parameters": {"rope_theta": default} | dict(params.get(kind) or {})}
    if kind == FULL:
        return rest | {"rope_parameters": {"rope_theta": config.get("rope_theta", 1e6)} | params}
    return rest | {"rope_parameters": {"rope_theta": config.get("rope_local_base_freq", 1e4)}}


def _listed(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers rotate, by `no_rope_layers` (in which 1 means that a layer rotates)."""
    flags = config.get("no_rope_layers")
    if flags is None:
        every = _whole(config, "no_rope_layer_interval")
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers:
        raise CheckpointError(
            f"config.json: `no_rope_layers` must have one number for each of {num_layers} layers"
        )
    return [bool(flag) for flag in flags]


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not is_integer(value, 1) or value > 2**31:
        raise CheckpointError(f"config.json: `{name}` must be a positive integer, not {shown(value)}")
    return value
