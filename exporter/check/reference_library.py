"""Compares our reading of a checkpoint with that of transformers (and peft) on one prompt.

Only stock classes are used: code in a checkpoint is never run, and `a2d-*` is loaded as the stock model whose
weights it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...runtime import machine
from ...runtime.errors import ExportError
from ..checkpoint.adapter import MergedTensors
from ..checkpoint.names import EMBEDDING
from ..checkpoint.open import Checkpoint
from ..checkpoint.stock import silence, stock_class, stock_config
from ..checkpoint.tensors import read_json
from .segments import count_weights

BOUND = 3e-3  # of the largest logit: both compute in fp32, but in another order
SHARE_OF_MEMORY = 0.6  # of the free memory
BYTES_PER_WEIGHT = 5  # four for the model in fp32, and some for loading


def compare(checkpoint: Checkpoint, sequence: Sequence[int], ours: np.ndarray) -> str | None:
    """The libraries that agree with `ours`, fp32 logits [tokens, vocab] of `sequence`: for example
    "transformers 5.1, peft 0.2".

    None if an adapter needs peft, or if the model in fp32 does not fit in memory. Raises ExportError if their
    logits differ.
    """
    if checkpoint.adapter is not None and find_spec("peft") is None:
        return None
    free, needed = machine.available(), BYTES_PER_WEIGHT * count_weights(checkpoint.tensors.shapes)
    if free is not None and needed > SHARE_OF_MEMORY * free:
        return None
    try:
        libraries, theirs = _logits(checkpoint, sequence)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # their readers raise many types
        raise ExportError(
            f"{checkpoint.source}: transformers cannot read this checkpoint ({type(error).__name__}:"
            f" {str(error)[:300]}); update transformers and peft, or export without this comparison by"
            " --no-reference"
        ) from error
    width = min(theirs.shape[-1], ours.shape[-1])
    gap = float(np.abs(theirs[:, :width] - ours[:, :width]).max())
    size = max(1.0, float(np.abs(ours).max()))
    if not gap <= BOUND * size:  # NaN too
        same = int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        raise ExportError(
            f"{checkpoint.source}: {libraries} reads this checkpoint in another way: logits differ by"
            f" {gap:.3g} of {size:.3g}, and {same} of {len(sequence)} predictions are the same. Nothing was"
            " written. This exporter ignores or misreads a setting in config.json or adapter_config.json:"
            " please report it. Saving the checkpoint again with transformers (an adapter after"
            " merge_and_unload) may help"
        )
    return libraries


def _logits(checkpoint: Checkpoint, sequence: Sequence[int]) -> tuple[str, np.ndarray]:
    """The libraries that computed, and their logits [tokens, vocab]."""
    import torch
    import transformers

    libraries = f"transformers {transformers.__version__}"
    with silence(), torch.inference_mode():
        model = _load(checkpoint, torch)
        if checkpoint.adapter is not None:
            import peft

            libraries += f", peft {peft.__version__}"
            model = peft.PeftModel.from_pretrained(model, str(checkpoint.adapter)).eval()
        logits: np.ndarray = model(torch.tensor([list(sequence)])).logits[0].float().numpy()
        return libraries, logits


def _load(checkpoint: Checkpoint, torch: Any) -> Any:
    """The stock causal class of the checkpoint's family, in fp32."""
    tensors = checkpoint.tensors
    config = stock_config(read_json(checkpoint.model / "config.json"), long_context=checkpoint.long_context)
    is_tied = tensors.base_tied if isinstance(tensors, MergedTensors) else checkpoint.dims.tied
    config.tie_word_embeddings = is_tied
    model = stock_class(config).from_pretrained(
        str(checkpoint.model), config=config, dtype=torch.float32, attn_implementation="eager"
    )
    if is_tied:  # transformers 5 keeps a stored lm_head as it is
        model.lm_head.weight = model.get_input_embeddings().weight
    rows = tensors.shapes[EMBEDDING][0]
    if rows != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model.eval()
