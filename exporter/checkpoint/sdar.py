"""Checkpoints of `model_type: sdar`: I-DLM's are causal and are read as Qwen3, SDAR's own are refused.

Both have the same class, tensor names and mask token. Only the config field `use_regular_causal`, or its
default in the class that comes with the checkpoint, tells them apart. That class is never run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError
from ...runtime.rules import is_integer
from .tensors import read_text, reading, shown

MODEL_TYPE = "sdar"
CLASS_FILE = "configuration_sdar.py"
CAUSAL_BY_DEFAULT = re.compile(r"\buse_regular_causal\s*(?::\s*\w+\s*)?=\s*True\b")
RELAY = "relay_layer_norm."
MAX_MASKS = 63  # with the known token they are the largest block


def trained_masks(
    directory: Path, config: Mapping[str, Any], tensor_names: Collection[str], causal: bool
) -> int | None:
    """The number of masks of a block in training, `block_size`; None for other model types.

    `causal`: the user's word that attention is causal, if the checkpoint does not say. Raises CheckpointError
    for a checkpoint whose attention is or may be bidirectional, and for one with relayed hidden states.
    """
    if config.get("model_type") != MODEL_TYPE:
        return None
    if config.get("use_relay") or any(name.startswith(RELAY) for name in tensor_names):
        raise CheckpointError(
            f"{directory}: a relay variant of I-DLM (`use_relay`, `{RELAY}*`), which feeds hidden states of"
            " one step to the next; a step of this exporter takes token ids only"
        )
    declared = config.get("use_regular_causal")
    if declared is False or not (declared or causal or _is_causal_by_default(directory)):
        raise CheckpointError(
            f"{directory}: SDAR and I-DLM checkpoints have the same names. SDAR's attention is bidirectional"
            " inside a block, which this causal loop cannot run (docs/families.md). I-DLM's is causal, but"
            f" config.json says `use_regular_causal: {shown(declared)}`, and {CLASS_FILE} does not set it to"
            " True" + ("" if declared is False else "; if this is an I-DLM checkpoint, add --causal")
        )
    masks = config.get("block_size")
    if not is_integer(masks, 1) or masks > MAX_MASKS:
        raise CheckpointError(
            f"{directory}: config.json: `block_size`, the masks of a block in training, must be 1 to"
            f" {MAX_MASKS}, not {shown(masks)}"
        )
    return int(masks)


def _is_causal_by_default(directory: Path) -> bool:
    """Whether the text of the checkpoint's config class sets `use_regular_causal` to True by default."""
    path = directory / CLASS_FILE
    with reading(path):
        text = read_text(path) if path.is_file() else ""
    return CAUSAL_BY_DEFAULT.search(re.sub(r"#.*", "", text)) is not None
