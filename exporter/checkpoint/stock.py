"""Reads a config.json as transformers does: defaults and dialects, windows, and rotary frequencies."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...runtime.errors import CheckpointError
from ...runtime.rules import is_integer
from .tensors import reading, shown

# MiMo is a Qwen2 with an MTP layer, which transformers ignores.
# The MARS authors' A2D classes and I-DLM's have stock weights under stock names, inference is plainly causal,
# and they never use sliding windows. sdar.py tells I-DLM's from SDAR's own.
ALIASES = {
    "a2d-qwen2": "qwen2",
    "a2d-qwen3": "qwen3",
    "a2d-qwen3-it": "qwen3",
    "sdar": "qwen3",
    "mimo": "qwen2",
    "qwen3_5": "qwen3_5_text",
}
NEVER_SLIDING = ALIASES.keys() - {"mimo", "qwen3_5"}
MULTIMODAL = "qwen3_5"  # its text model has a config and tensors of its own
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Fields of a config that are not settings of a causal model; `num_labels` alone could fill the memory.
NOT_SETTINGS = (
    "auto_map",
    "model_type",
    "architectures",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "transformers_version",
    "num_labels",
    "id2label",
    "label2id",
)


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding."""

    inv_freq: np.ndarray  # float32 [rotary_dim / 2]
    scale: float  # factor of cos and sin: yarn's attention factor, else 1
    context: int = 0  # positions that the scaling supports; 0: max_position_embeddings
    limit: int = 0  # positions beyond which the model uses other frequencies; 0: none


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a multimodal checkpoint's text model; of any other, `values`."""
    text = values.get("text_config")
    if values.get("model_type") != MULTIMODAL or not isinstance(text, Mapping):
        return values
    shared = ("tie_word_embeddings", "quantization_config", "transformers_weights")
    return {**text, **{name: values[name] for name in shared if name in values}, "model_type": MULTIMODAL}


def stock_config(values: Mapping[str, Any], *, long_context: bool = False) -> Any:
    """The config of the stock class for the fields of a config.json. Code of a checkpoint is never run.

    `long_context`: longrope's frequencies for long texts at every position. Raises CheckpointError for what
    transformers refuses.
    """
    values = text_config(values)
    declared = str(values.get("model_type"))
    settings = copy.deepcopy({name: value for name, value in values.items() if name not in NOT_SETTINGS})
    if declared in NEVER_SLIDING:
        settings["use_sliding_window"] = False
        settings.pop("layer_types", None)
    with reading("config.json"), silence():
        from transformers import AutoConfig

        if not (window := settings.get("sliding_window")) and window is not None:  # 0 turns windows off
            settings["sliding_window"] = None
        config = AutoConfig.for_model(ALIASES.get(declared, declared), **settings)
        kinds = getattr(config, "layer_types", None) or []
        known = (FULL, LINEAR) if config.model_type == "qwen3_5_text" else (FULL, SLIDING)
        if other := [kind for kind in kinds if kind not in known]:
            raise CheckpointError(
                f"config.json: `layer_types` has {shown(other[0])}, which is not supported (known:"
                f" {', '.join(known)}); ignoring it would change the model"
            )
        if SLIDING in kinds and getattr(config, "sliding_window", None) is None:
            config.layer_types = [FULL] * len(kinds)
        if long_context:
            params = config.rope_parameters
            if params["rope_type"] != "longrope":
                raise CheckpointError(
                    f"config.json: rope type `{params['rope_type']}` has no separate frequencies for long"
                    " texts: leave out --long-context"
                )
            params["short_factor"] = params["long_factor"]
        return config


def rope(config: Any, kind: str | None = None, *, partial: bool = False, long_context: bool = False) -> Rope:
    """The rotary embedding of a stock config; `kind` is the type of layer if each has its own.

    `partial`: the family rotates a part of each head if the config says so. Raises CheckpointError for
    settings that the stock class would ignore.
    """
    with reading("config.json"), silence():
        params = config.rope_parameters if kind is None else config.rope_parameters[kind]
        share = params.get("partial_rotary_factor", 1.0)
        if any(isinstance(value, Mapping) for value in params.values()) or (share != 1 and not partial):
            raise CheckpointError(
                "config.json: rope parameters for parts of a head (`partial_rotary_factor`) or for types of"
                " layers are not supported for this architecture"
            )
        rotary = _rotary_class(config)(config)
        prefix = "" if kind is None else f"{kind}_"
        inv_freq = getattr(rotary, f"{prefix}inv_freq").numpy()
        scale = float(getattr(rotary, f"{prefix}attention_scaling"))
        if not np.isfinite([*inv_freq, scale]).all():
            raise CheckpointError("config.json: its rope parameters give no finite frequencies")
        context = limit = 0
        if params["rope_type"] == "yarn":
            context = int(params["factor"] * params["original_max_position_embeddings"])
        if params["rope_type"] == "longrope" and not long_context:
            limit = int(params["original_max_position_embeddings"])
        return Rope(inv_freq, scale, context, limit)


def windows(config: Any, typed: bool) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, None for full causal attention: of the layers that the config
    names as sliding if they are `typed`, else of all.
    """
    window, num_layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    if window is not None and not is_integer(window, 1):
        raise CheckpointError(
            f"config.json: `sliding_window` must be a number of tokens, or null or 0 for no window, not"
            f" {shown(window)}"
        )
    kinds = config.layer_types if typed else [SLIDING] * num_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def stock_class(config: Any) -> Any:
    """The stock causal class of a config."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def _rotary_class(config: Any) -> Any:
    """The class that computes rotary frequencies, beside the stock causal class."""
    members = vars(sys.modules[stock_class(config).__module__])
    found = (n for n in members if n.endswith("RotaryEmbedding") and "Vision" not in n)
    return members[next(found)]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep progress bars and advice of transformers and peft out of an export's output."""
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
