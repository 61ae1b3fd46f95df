"""Merges a PEFT LoRA adapter into its base checkpoint, one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...runtime.errors import CheckpointError, listed
from .names import EMBEDDING, HEAD
from .tensors import (
    StoredTensors,
    Tensors,
    chunks,
    first_of,
    read_header,
    read_json,
    reading,
    same_numbers,
    shown,
)

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE, SHARDS = "adapter_model.safetensors", "adapter_model-*.safetensors"
PREFIX = "base_model.model."
MERGED = "merge it first: `model.merge_and_unload().save_pretrained(path)`"
# Each of these changes what PEFT computes, or changes the base model when PEFT loads the adapter.
UNSUPPORTED = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "fan_in_fan_out",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layer_replication",
    "kasa_config": "KaSA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "monteclora_config": "MonteCLoRA",
    "lora_bias": "lora_bias",
}
# These only initialize A and B; others (pissa, olora, corda, loftq, lora_ga) also change the base weights.
PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
# What PEFT may insert between a module's name and its parameter; `original_module` is the base's, and unused.
WRAPPERS = ("modules_to_save", "base_layer", "original_module")


Patterns = Mapping[re.Pattern[str], T]
"""Values by regular expressions, as in PEFT: of a module's whole name, or of its end after a dot."""


def _compiled(values: Mapping[str, T]) -> Patterns[T]:
    return {re.compile(rf"(.*\.)?({pattern})"): value for pattern, value in values.items()}


def _find(patterns: Patterns[T], module: str, default: T) -> T:
    """The value of the first pattern that matches."""
    return next((value for pattern, value in patterns.items() if pattern.fullmatch(module)), default)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of `adapter_config.json` that decide how weights are merged.

    A module's rank is read off its tensors.
    """

    base: str | None  # None: not known, so --base is needed
    revision: str | None
    alpha: float
    rslora: bool
    alpha_pattern: Patterns[float]
    token_indices: Patterns[tuple[int, ...]]
    modules_to_save: tuple[str, ...] = ()
    keeps_tied: bool = False  # `ensure_weight_tying`: a trained tied table is used for both of its purposes

    def scaling(self, module: str, rank: int) -> float:
        alpha = _find(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read `adapter_config.json`. Raises CheckpointError for settings that cannot be merged here."""
    path = directory / CONFIG_FILE
    raw: dict[str, Any] = read_json(path)
    kind, init = str(raw.get("peft_type"))[:80], raw.get("init_lora_weights", True)
    refused = [name for field, name in UNSUPPORTED.items() if raw.get(field)]
    if raw.get("bias", "none") != "none":
        refused.append(f"bias={str(raw['bias'])[:80]}")
    if init not in PLAIN_INITS:
        refused.append(f"init_lora_weights={str(init)[:80]}, which changes the base weights too,")
    if kind != "LORA" or refused:
        what = ", ".join(refused) if kind == "LORA" else f"peft_type {kind}"
        raise CheckpointError(f"{path}: {what} cannot be merged while streaming; {MERGED}")
    with reading(path):
        if (rank := int(raw["r"])) < 1:
            raise ValueError(f"`r` is {rank}")
        base, revision = raw.get("base_model_name_or_path"), raw.get("revision")
        rows = raw.get("trainable_token_indices") or {}  # a plain list is for `embed_tokens`
        named = {"embed_tokens": rows} if isinstance(rows, list) else dict(rows)
        return AdapterConfig(
            base=str(base) if base else None,
            revision=str(revision) if revision else None,
            alpha=float(raw.get("lora_alpha", rank)),
            rslora=bool(raw.get("use_rslora")),
            alpha_pattern=_compiled({k: float(v) for k, v in dict(raw.get("alpha_pattern") or {}).items()}),
            token_indices=_compiled({k: tuple(map(int, ids)) for k, ids in named.items()}),
            modules_to_save=tuple(map(str, raw.get("modules_to_save") or ())),
            keeps_tied=bool(raw.get("ensure_weight_tying")),
        )


def adapter_tensors(directory: Path) -> StoredTensors:
    """The tensors of an adapter, in one file or in shards. Raises CheckpointError if there are none."""
    single = directory / WEIGHTS_FILE
    files = [single] if single.is_file() else sorted(directory.glob(SHARDS))
    if not files:
        raise CheckpointError(
            f"{directory}: no {WEIGHTS_FILE} beside {CONFIG_FILE}; was the download complete?"
        )
    return StoredTensors({name: entry for file in files for name, entry in read_header(file).items()})


class MergedTensors:
    """Base tensors into which an adapter is merged as they are read: W + scaling * B @ A, new rows, or whole
    new modules.

    `tied`: whether the merged model's lm_head is its embedding. Training one of them separately unties them.
    """

    def __init__(self, base: Tensors, directory: Path, config: AdapterConfig, tied: bool = False) -> None:
        self.base, self.config = base, config
        self.adapter = adapter_tensors(directory)
        self.pairs: dict[str, tuple[str, str]] = {}  # A and B, by the name of the weight
        self.rows: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.replaced: dict[str, str] = {}
        self.base_tied = tied
        self._sort_entries(directory)
        self.tied = tied and not self._unties()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {
            **self.base.shapes,
            **{name: self.adapter.shapes[key] for name, key in self.replaced.items()},
        }
        if self.base_tied and not self.tied and HEAD not in self.replaced:
            shapes[HEAD] = self.base.shapes[EMBEDDING]
        return shapes

    def read(self, name: str) -> np.ndarray:
        weight = self._unmerged(name)
        if name in self.pairs:
            return self._with_low_rank(name, weight)
        if name in self.rows:
            key, indices = self.rows[name]
            weight = np.array(weight)
            weight[list(indices)] = self.adapter.read(key).astype(weight.dtype)
        return weight

    def _unmerged(self, name: str) -> np.ndarray:
        if name in self.replaced:
            return self.adapter.read(self.replaced[name])
        return self.base.read(EMBEDDING if name == HEAD and self.base_tied else name)

    def _with_low_rank(self, name: str, weight: np.ndarray) -> np.ndarray:
        down, up = (self.adapter.read(key).astype(np.float32) for key in self.pairs[name])
        scaling = self.config.scaling(name.removesuffix(".weight"), down.shape[0])
        if self._is_embedding_pair(name):
            down, up = up.T, down.T  # (B A)^T
        merged = np.empty(weight.shape, np.float32)
        start = 0
        for part in chunks(weight):
            rows = slice(start, start + part.shape[0])
            merged[rows] = part.astype(np.float32) + scaling * (up[rows] @ down)
            start = rows.stop
        return merged

    def _is_embedding_pair(self, name: str) -> bool:
        return "lora_embedding_" in self.pairs[name][0]

    def _unties(self) -> bool:
        """Whether PEFT runs a tied base with this adapter with two tables, lm_head and the embedding."""
        if self.config.keeps_tied or EMBEDDING not in self.base.shapes:
            return False
        if HEAD in self.pairs or EMBEDDING in self.pairs:
            return True
        if HEAD in self.replaced:
            return not same_numbers(self._unmerged(EMBEDDING), self._unmerged(HEAD))
        return EMBEDDING in self.replaced and "embed_tokens" in self.config.modules_to_save

    def _sort_entries(self, directory: Path) -> None:
        unknown = []
        halves: dict[str, dict[str, str]] = {}
        for key in self.adapter.shapes:
            name = key.removeprefix(PREFIX)
            if match := re.fullmatch(r"(.+)\.lora_(?:embedding_)?(A|B)(?:\.default)?(?:\.weight)?", name):
                halves.setdefault(f"{match[1]}.weight", {})[match[2]] = key
            elif match := re.fullmatch(
                r"(.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.default)?", name
            ):
                self.rows[f"{match[1]}.weight"] = (key, _find(self.config.token_indices, match[1], ()))
            elif match := re.fullmatch(
                rf"(.+?)(?:\.({'|'.join(WRAPPERS)}))?(?:\.default)?\.(weight|bias)", name
            ):
                if match[2] == "modules_to_save":
                    self.replaced[f"{match[1]}.{match[3]}"] = key
                elif match[2] != "original_module":
                    self.replaced.setdefault(f"{match[1]}.{match[3]}", key)
            else:
                unknown.append(key)
        targets = [*halves, *self.rows, *self.replaced]
        unknown += [t for t in targets if t not in self.base.shapes and t != HEAD]
        unknown += [key for pair in halves.values() if len(pair) != 2 for key in pair.values()]
        if unknown:
            raise CheckpointError(
                f"{directory}: adapter tensors that do not belong to the base model: {first_of(unknown)};"
                " is this the right base?"
            )
        self.pairs = {name: (pair["A"], pair["B"]) for name, pair in halves.items()}
        self._check_fit(directory)

    def _base_shape(self, name: str) -> tuple[int, ...]:
        if name in self.replaced:
            return self.adapter.shapes[self.replaced[name]]
        return self.base.shapes.get(name) or self.base.shapes.get(EMBEDDING) or ()

    def _check_fit(self, directory: Path) -> None:
        ours, wrong = self.adapter.shapes, []
        for name, (down, up) in self.pairs.items():
            shape, (first, second) = self._base_shape(name), (ours[down], ours[up])
            if self._is_embedding_pair(name):
                shape = shape[::-1]
            rank = first[0] if first else 0
            if len(shape) != 2 or rank < 1 or first != (rank, shape[1]) or second != (shape[0], rank):
                wrong.append(f"{name} is {[*shape]}, LoRA is {[*second]} x {[*first]}")
        for name, (key, indices) in self.rows.items():
            shape = self._base_shape(name)
            if (
                len(shape) != 2
                or ours[key] != (len(indices), shape[1])
                or not all(0 <= i < shape[0] for i in indices)
            ):
                wrong.append(f"{name} {[*shape]}: trained rows {[*ours[key]]} at {shown(list(indices))}")
        if wrong:
            raise CheckpointError(f"{directory}: the adapter does not fit its base model:{listed(wrong)}")
