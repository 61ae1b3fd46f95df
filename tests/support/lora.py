"""LoRA adapters by peft, with random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch

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
