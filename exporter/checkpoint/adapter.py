"""A PEFT LoRA adapter over a base checkpoint, merged one tensor at a time. Knows PEFT's files; never holds the model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.errors import CheckpointError
from .tensors import SafetensorsFile, Tensors, chunks, read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
UNSUPPORTED = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "fan_in_fan_out",
    "alora_invocation_tokens": "activated LoRA",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of `adapter_config.json` that decide how the weights are merged. Each module's rank is that of its tensors."""

    base: str
    revision: str | None
    alpha: float
    rslora: bool
    alpha_pattern: Mapping[str, float]
    token_indices: Mapping[str, tuple[int, ...]]

    def scaling(self, module: str, rank: int) -> float:
        alpha = float(_matching(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read `adapter_config.json`; refuse every setting that our merge would not reproduce."""
    path = directory / CONFIG_FILE
    raw = read_json(path)
    kind = str(raw.get("peft_type"))
    refused = [name for field, name in UNSUPPORTED.items() if raw.get(field)]
    if raw.get("bias", "none") != "none":
        refused.append(f"bias={raw['bias']}")
    if kind != "LORA" or refused:
        what = ", ".join(refused) if kind == "LORA" else f"peft_type {kind}"
        raise CheckpointError(
            f"{path}: {what} cannot be merged while streaming; merge it first: `model.merge_and_unload().save_pretrained(path)`"
        )
    base, rank = raw.get("base_model_name_or_path"), raw.get("r")
    if not isinstance(base, str) or not base or not isinstance(rank, int) or rank <= 0:
        raise CheckpointError(
            f"{path}: `base_model_name_or_path` and a positive `r` are needed; name the base with --base"
        )
    return AdapterConfig(
        base=base,
        revision=raw.get("revision"),  # type: ignore[arg-type]
        alpha=_numbers(path, {"lora_alpha": raw.get("lora_alpha", rank)})["lora_alpha"],
        rslora=bool(raw.get("use_rslora")),
        alpha_pattern=_numbers(path, raw.get("alpha_pattern") or {}),
        token_indices=_token_lists(path, raw.get("trainable_token_indices") or {}),
    )


def _numbers(path: Path, values: object) -> dict[str, float]:
    """Numbers by module name or by a regular expression for one."""
    try:
        return {key: float(value) for key, value in values.items() if re.compile(key)}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(
            f"{path}: numbers by module name are expected, not {values!r} ({error})"
        ) from error


def _token_lists(path: Path, values: object) -> dict[str, tuple[int, ...]]:
    """Trained token ids by the name of the embedding; a plain list means `embed_tokens`."""
    named = {"embed_tokens": values} if isinstance(values, list) else values
    if not isinstance(named, dict) or not all(
        isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in named.values()
    ):
        raise CheckpointError(
            f"{path}: `trainable_token_indices` must hold lists of token ids, not {values!r}"
        )
    return {name: tuple(ids) for name, ids in named.items()}


class MergedTensors:
    """Base tensors with an adapter merged into each as it is read: W + scaling * B @ A, replaced rows, replaced modules."""

    def __init__(self, base: Tensors, directory: Path, config: AdapterConfig) -> None:
        if not (directory / WEIGHTS_FILE).is_file():
            raise CheckpointError(
                f"{directory}: no {WEIGHTS_FILE} beside {CONFIG_FILE}; was the download complete?"
            )
        self.base, self.config = base, config
        self.adapter = SafetensorsFile(directory / WEIGHTS_FILE)
        self.pairs: dict[str, tuple[str, str]] = {}
        self.rows: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.replaced: dict[str, str] = {}
        self._sort_entries(directory)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self.base.shapes, **{name: self.adapter.shapes[key] for name, key in self.replaced.items()}}

    def read(self, name: str) -> np.ndarray:
        if name in self.replaced:
            return self.adapter.read(self.replaced[name])
        weight = self.base.read(name)
        if name in self.pairs:
            return self._with_low_rank(name, weight)
        if name in self.rows:
            key, indices = self.rows[name]
            weight = np.array(weight)
            weight[list(indices)] = self.adapter.read(key).astype(weight.dtype)
        return weight

    def _with_low_rank(self, name: str, weight: np.ndarray) -> np.ndarray:
        down, up = (self.adapter.read(key).astype(np.float32) for key in self.pairs[name])
        scaling = self.config.scaling(name.removesuffix(".weight"), down.shape[0])
        merged = np.empty(weight.shape, np.float32)
        start = 0
        for part in chunks(weight):
            rows = slice(start, start + part.shape[0])
            merged[rows] = part.astype(np.float32) + scaling * (up[rows] @ down)
            start = rows.stop
        return merged

    def _sort_entries(self, directory: Path) -> None:
        unknown = []
        halves: dict[str, dict[str, str]] = {}
        for key in self.adapter.entries:
            name = key.removeprefix(PREFIX)
            if match := re.fullmatch(r"(.+)\.lora_(A|B)(?:\.default)?\.weight", name):
                halves.setdefault(f"{match[1]}.weight", {})[match[2]] = key
            elif match := re.fullmatch(
                r"(.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.default)?", name
            ):
                self.rows[f"{match[1]}.weight"] = (key, self._indices(match[1]))
            elif match := re.fullmatch(r"(.+?)(?:\.modules_to_save)?(?:\.default)?\.(weight|bias)", name):
                self.replaced[f"{match[1]}.{match[2]}"] = key
            else:
                unknown.append(key)
        base = self.base.shapes
        targets = [*halves, *self.rows, *self.replaced]
        unknown += [t for t in targets if t not in base and t != "lm_head.weight"]
        unknown += [key for pair in halves.values() if len(pair) != 2 for key in pair.values()]
        if unknown:
            raise CheckpointError(
                f"{directory}: adapter tensors with no place in the base model: {', '.join(unknown[:10])}; is this the right base?"
            )
        for name, pair in halves.items():
            self.pairs[name] = (pair["A"], pair["B"])
        self._check_fit(directory)

    def _indices(self, module: str) -> tuple[int, ...]:
        return tuple(_matching(self.config.token_indices, module, ()))

    def _check_fit(self, directory: Path) -> None:
        base, ours = self.base.shapes, self.adapter.shapes
        wrong = []
        for name, (down, up) in self.pairs.items():
            rows, columns = base[name]
            rank = ours[down][0]
            if ours[down] != (rank, columns) or ours[up] != (rows, rank):
                wrong.append(f"{name} is {[rows, columns]}, LoRA is {list(ours[up])} x {list(ours[down])}")
        for name, (key, indices) in self.rows.items():
            if ours[key] != (len(indices), base[name][1]) or max(indices, default=0) >= base[name][0]:
                wrong.append(f"{name} {list(base[name])}: trained rows {list(ours[key])} at {list(indices)}")
        if wrong:
            raise CheckpointError(
                f"{directory}: the adapter does not fit its base model:\n  " + "\n  ".join(wrong[:10])
            )
