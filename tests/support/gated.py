"""Draft adapters by peft with random B, and an oracle that knows nothing of the exporter: the stock model of
transformers with a hook on every adapted Linear map.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import peft
import torch
from onnx import helper
from safetensors.numpy import load_file
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from support import tiny

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def write_adapter(
    base: Path,
    directory: Path,
    made: tiny.Tiny,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A LoRA adapter of `base` whose effect is as large as the weights."""
    model = tiny.load(made, base)
    targets = settings.pop("target_modules", list(FUSED if made.family == "phi3" else TARGETS))
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **settings
    )
    adapted = peft.get_peft_model(model, config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                size = 1 / parameter.shape[1] ** 0.5
                size *= 8 / alpha if "lora_B" in name else 1
                parameter.copy_(size * torch.randn(parameter.shape, generator=draw))
    adapted.save_pretrained(str(directory))
    tiny.change_config(directory, "adapter_config.json", base_model_name_or_path=str(base))
    return directory


def with_adapter_values(source: Path, target: Path, value: float) -> Path:
    """A copy of a bundle in which every number of A is `value`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    model = onnx.load(source / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".draft_a"):
            place = {entry.key: entry.value for entry in tensor.external_data}
            kind, size = helper.tensor_dtype_to_np_dtype(tensor.data_type), np.prod(tensor.dims)
            file = target / place["location"]
            np.memmap(file, kind, "r+", int(place["offset"]), (int(size),))[:] = value
    manifest = open_bundle(source).manifest
    files = tuple(describe(target / entry.path) for entry in manifest.files)
    write_manifest(target, replace(manifest, files=files))
    return target


def shares(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> dict[int, float]:
    """The probability of each token that may be drawn, by transformers' warpers."""
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits)[None].double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = torch.softmax(scores, -1)[0].numpy()
    return {int(token): float(found[token]) for token in np.flatnonzero(found)}


class GatedOracle:
    """The stock model, with each adapter at its own slots."""

    def __init__(self, made: tiny.Tiny, base: Path, adapters: Sequence[Path]) -> None:
        self.model = tiny.load(made, base)
        self.owner = torch.zeros(0)
        for number, directory in enumerate(adapters, 1):
            config = json.loads((directory / "adapter_config.json").read_text())
            stored = load_file(directory / "adapter_model.safetensors")
            for key, down in stored.items():
                if ".lora_A." in key:
                    up = stored[key.replace(".lora_A.", ".lora_B.")]
                    path = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
                    self._hook(path, number, down, up, self._scale(config, path, len(down)))

    @staticmethod
    def _scale(config: dict[str, Any], path: str, rank: int) -> float:
        alpha = config["lora_alpha"]
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            alpha = value if path.endswith(pattern) else alpha
        return alpha / (rank**0.5 if config.get("use_rslora") else rank)

    def _hook(self, path: str, number: int, down: np.ndarray, up: np.ndarray, scale: float) -> None:
        a, b = torch.from_numpy(down), torch.from_numpy(up)

        def add(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            gate = (self.owner == number)[..., None]
            return output + scale * ((inputs[0] @ a.T) * gate) @ b.T

        self.model.get_submodule(path).register_forward_hook(add)

    def logits(self, ids: Sequence[int], vocab_size: int = tiny.VOCAB_SIZE) -> np.ndarray:
        """[len(ids), vocab]: ids from `vocab_size` on are those of draft slots."""
        rows = torch.tensor([list(ids)])
        self.owner = rows // vocab_size
        with torch.inference_mode():
            return self.model(rows % vocab_size).logits[0].numpy()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The stock model's answer, by transformers' own loop."""
        self.owner = torch.zeros(1, 1)
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                pad_token_id=tiny.ENDOFTEXT,
            )  # fmt: skip
        return made[0, len(prompt) :].tolist()
