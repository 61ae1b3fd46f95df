"""Reads draft adapters: LoRA pairs that stay apart from the base model and act at draft slots only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...runtime.errors import CheckpointError, MarsWarning
from .adapter import AdapterConfig, MergedTensors, adapter_tensors, read_adapter_config
from .architecture import names
from .architecture.dims import Dims
from .tensors import Tensors, check_finite, first_of

DRAFT_IDS = ("mask", "noise")
DRAFT_SCALE = 16  # draft adapters have a scale of 16 to 64, adapters that are merged mostly 1 to 4
NEMO_FILE = "automodel_peft_config.json"  # NeMo writes it beside draft adapters
# What tells other kinds of draft adapters, which need another step than this one.
FOREIGN = {
    "sigma_noisy_stream": "a Sigma-Uno adapter, whose draft slots are fed embeddings instead of token ids",
    "base_model.model.encoder.": "an adapter for drafts with bidirectional attention"
    " (Nemotron's linear_spec_lora)",
}


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft adapters over one base model. Adapter k is the owner k + 1 of its draft slots.

    `low` and `high`: the token ids of draft slots, without `high`. `changed` makes A and B of a weight fit a
    base model that is stored in another form.
    """

    names: tuple[str, ...]
    adapters: tuple[MergedTensors, ...]
    low: int
    high: int
    changed: Callable[[str, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None

    def pairs(self, weight: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(owner, A [rank, in], B [out, rank]) of each adapter for a weight, in fp32; alpha / r is in B."""
        for owner, adapter in enumerate(self.adapters, 1):
            if weight in adapter.pairs:
                down, up = (adapter.adapter.read(key) for key in adapter.pairs[weight])
                for key, part in zip(adapter.pairs[weight], (down, up), strict=True):
                    check_finite(key, part)
                scale = adapter.config.scaling(weight.removesuffix(".weight"), len(down))
                pair = down.astype(np.float32), up.astype(np.float32) * np.float32(scale)
                yield (owner, *(pair if self.changed is None else self.changed(weight, *pair)))

    def owners(self, weights: tuple[str, ...]) -> tuple[int, ...]:
        """The owner of each column of A, of `matrices`."""
        return tuple(
            owner
            for weight in weights
            for owner, adapter in enumerate(self.adapters, 1)
            if weight in adapter.pairs
            for _ in range(adapter.adapter.shapes[adapter.pairs[weight][0]][0])
        )

    def matrices(self, weights: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """A [in, ranks] and B [ranks, out] of all adapters for weights whose outputs are joined: B is 0 where
        a row and an output belong to different weights.
        """
        sizes = [self.adapters[0].base.shapes[weight] for weight in weights]
        ranks, total = len(self.owners(weights)), sum(size[0] for size in sizes)
        down, up = np.zeros((sizes[0][1], ranks), np.float32), np.zeros((ranks, total), np.float32)
        rank = first = 0
        for weight, size in zip(weights, sizes, strict=True):
            for _, a, b in self.pairs(weight):
                down[:, rank : rank + len(a)] = a.T
                up[rank : rank + len(a), first : first + size[0]] = b.T
                rank += len(a)
            first += size[0]
        return down, up


def products(dims: Dims) -> dict[str, tuple[str, ...]]:
    """The graph's products of a layer's Linear maps, by name: the weights that each joins."""
    parts = {
        "qkv": dims.quirks.qkv,
        "attention_output": (names.O,),
        "gate_up": dims.quirks.gate_up,
        "down": (names.DOWN,),
    }
    return {
        f"layers.{i}.{name}": tuple(names.weight(i, part) for part in group)
        for i in range(dims.num_layers)
        for name, group in parts.items()
    }


def open_drafts(directories: Mapping[str, Path], base: Tensors, ids: tuple[int, int]) -> Drafts:
    """Open draft adapters by their names. Raises CheckpointError for adapters that would change other slots
    than draft slots, or that are of another kind.
    """
    adapters = tuple(_open(directory, base) for directory in directories.values())
    return Drafts(tuple(directories), adapters, *ids)


def _open(directory: Path, base: Tensors) -> MergedTensors:
    config = read_adapter_config(directory, is_draft=True)
    stored = adapter_tensors(directory).shapes
    for mark, what in FOREIGN.items():
        if any(mark in name for name in stored):
            raise CheckpointError(f"{directory}: {what}; it cannot be used as a draft adapter here")
    if config.modules_to_save or config.token_indices:
        what = "modules_to_save" if config.modules_to_save else "trainable_token_indices"
        raise CheckpointError(
            f"{directory}: `{what}` replaces weights at every slot, and a draft adapter must not change the"
            " stock model's text; use an adapter with LoRA pairs only, or merge it: mars-export onnx"
            f" {directory}"
        )
    adapter = MergedTensors(base, directory, config)
    wrong = [name for name in (*adapter.rows, *adapter.replaced, *adapter.pairs) if not names.is_linear(name)]
    if wrong:
        raise CheckpointError(
            f"{directory}: a draft adapter may change the Linear maps of layers only, not {first_of(wrong)}"
        )
    return adapter


def check_merge(directory: Path, config: AdapterConfig) -> None:
    """Raise CheckpointError for NeMo's draft adapters; warn about a large scale."""
    advice = (
        "a draft adapter acts at draft slots only; merged into every slot it gives nonsense. Give it with its"
        f" base: mars-export onnx BASE --draft-adapter {directory}"
    )
    if (directory / NEMO_FILE).is_file():
        raise CheckpointError(
            f"{directory}: {NEMO_FILE} is beside it, as for a draft adapter; {advice}. If it was trained"
            " without a gate, merge it first: `model.merge_and_unload().save_pretrained(path)`"
        )
    scale = config.scaling("", config.rank)
    if scale >= DRAFT_SCALE:
        warnings.warn(
            f"{directory}: merged at a scale of {scale:g}, which is usual for draft adapters; {advice}",
            MarsWarning,
            stacklevel=3,
        )
