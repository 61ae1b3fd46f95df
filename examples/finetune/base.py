"""The base model, its mask token, and what is trained of it: a LoRA and the row of the mask token, or all."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mars_export.exporter.checkpoint import default
from mars_export.exporter.checkpoint.families import FAMILIES, refusal

# Tokens that model vendors reserve, and `<empty_output>` of SmolLM2's vocabulary for code, unused in chat.
RESERVED = re.compile(r"\W*(reserved|unused|dummy|placeholder|extra_\d|special_\d|empty_output)", re.I)


@dataclass(frozen=True, slots=True)
class Base:
    """Where the base is, what an adapter calls it, its tokenizer and its end-of-sequence ids."""

    path: str
    name: str
    rows: int  # of the embedding
    tokenizer: Any
    ends: frozenset[int]


def open_base(location: str | None, adapter: Path | None) -> Base:
    """Config and tokenizer, not the weights; None is SmolLM2-135M-Instruct."""
    path = name = str(Path(location).resolve()) if location and Path(location).is_dir() else location
    if path is None or name is None:
        path, name = str(default.base_directory()), default.BASE_NAME
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILIES:
        reason = refusal(config.model_type) or f"known families are {', '.join(FAMILIES)}"
        raise SystemExit(f"{path}: mars-export cannot export `{config.model_type}`: {reason}")
    tokenizer = AutoTokenizer.from_pretrained(adapter or path)
    ends = [config.eos_token_id, tokenizer.eos_token_id]
    with contextlib.suppress(OSError):  # a checkpoint may have none
        ends.append(GenerationConfig.from_pretrained(path).eos_token_id)
    flat = {i for value in ends for i in (value if isinstance(value, list) else [value]) if i is not None}
    return Base(path, name, config.vocab_size, tokenizer, frozenset(flat))


def choose_mask(base: Base, wanted: str | None, used: Collection[int]) -> tuple[int, str]:
    """The mask token's id, and how it was chosen; sets the tokenizer's `mask_token`.

    It is `wanted`, or the tokenizer's, or a reserved special token that neither the chat template nor a row
    uses, or a new one.
    """
    tokenizer = base.tokenizer
    name, why = wanted or tokenizer.mask_token, "as asked for" if wanted else "the tokenizer's mask token"
    if name is not None and name not in tokenizer.get_vocab():
        raise SystemExit(
            f"{base.path}: the tokenizer has no token `{name}`; give --mask-token one that it has"
        )
    if name is None:
        taken = {*used, *base.ends, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
        added = [(i, str(token)) for i, token in sorted(tokenizer.added_tokens_decoder.items())]
        free = [t for i, t in added if RESERVED.match(t) and i < base.rows and i not in taken]
        free = [token for token in free if token not in str(tokenizer.chat_template)]
        name, why = (free[0], "reserved, unused so far") if free else ("<|mask|>", "a new token")
    tokenizer.add_special_tokens({"mask_token": name})
    return tokenizer.mask_token_id, f"mask token {name} (id {tokenizer.mask_token_id}): {why}"


def load(base: Base, mask_id: int, is_new: bool, dtype: torch.dtype, device: str) -> Any:
    """The weights. The row of a mask token that `is_new` becomes the mean of all rows."""
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=dtype, attn_implementation="sdpa").to(
        device
    )
    if mask_id >= base.rows:
        model.resize_token_embeddings(len(base.tokenizer))
    if is_new:
        table = model.get_input_embeddings().weight.data
        table[mask_id] = table[: base.rows].float().mean(0).to(dtype)
    return model


def with_lora(model: Any, mask_id: int, rank: int, adapter: Path | None) -> Any:
    """The model with a LoRA on every linear map, or with the one that is given."""
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True).to(model.dtype)
    name = next(n for n, m in model.named_modules() if m is model.get_input_embeddings()).rpartition(".")[2]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    config.trainable_token_indices = {name: [mask_id]}
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def save(model: Any, base: Base, out: Path) -> None:
    """An adapter directory; a whole model after full training, or if the embedding has an additional row."""
    base.tokenizer.save_pretrained(out)
    if not isinstance(model, PeftModel) or model.config.vocab_size != base.rows:
        whole = copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model
        whole.save_pretrained(out)
    else:
        model.peft_config["default"].base_model_name_or_path = base.name
        model.save_pretrained(out, save_embedding_layers=False)
