"""The model, its mask token, and the two streams of a forward: texts, and windows of masks over the answers.

Sequences are laid out one after the other, without padding. Attention is computed for each on its own. A
model with recurrent layers, which read one token after the other, gets a row for each text and each window.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rows import Sequence
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from mars_export.exporter.checkpoint import default
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.stock import silence, stock_class, stock_config
from mars_export.exporter.checkpoint.tensors import read_json

# Tokens that model vendors reserve, and `<empty_output>` of SmolLM2's vocabulary for code, unused in chat.
RESERVED = re.compile(r"\W*(reserved|unused|dummy|placeholder|extra_\d|special_\d|empty_output)", re.I)


@dataclass(frozen=True, slots=True)
class Base:
    """Where the base is, what an adapter calls it, its tokenizer and its end-of-sequence ids."""

    path: Path
    adapter: Path | None  # to begin with
    name: str
    rows: int  # of the embedding
    tokenizer: Any
    ends: frozenset[int]


def open_base(location: str | None) -> Base:
    """Config and tokenizer, not the weights; None is SmolLM2-135M-Instruct. Raises CheckpointError."""
    opened = open_checkpoint(location or str(default.base_directory()), masks=False)
    name = str(Path(location).resolve()) if location and Path(location).is_dir() else location
    words, own = opened.vocabulary, opened.adapter
    source = own if own and (own / "tokenizer.json").is_file() else opened.model
    named = {"mask_token": words.named_mask, "chat_template": words.chat_template}
    tokenizer, ends = AutoTokenizer.from_pretrained(source, **named), frozenset(words.eos_token_ids)
    return Base(opened.model, own, name or default.BASE_NAME, opened.dims.vocab_size, tokenizer, ends)


def choose_mask(base: Base, used: Collection[int]) -> tuple[int, str]:
    """The mask token's id, and how it was chosen: the tokenizer's, or a reserved special token that neither
    the chat template nor a row uses, or a new one. It becomes the tokenizer's."""
    tokenizer = base.tokenizer
    name, why = tokenizer.mask_token, "the tokenizer's mask token"
    if name is None:
        taken = {*used, *base.ends, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
        added = [(i, str(token)) for i, token in sorted(tokenizer.added_tokens_decoder.items())]
        free = [t for i, t in added if RESERVED.match(t) and i < base.rows and i not in taken]
        free = [token for token in free if token not in str(tokenizer.chat_template)]
        name, why = (free[0], "reserved, unused so far") if free else ("<|mask|>", "a new token")
        tokenizer.add_special_tokens({"mask_token": name})
    return tokenizer.mask_token_id, f"mask token {name} (id {tokenizer.mask_token_id}): {why}"


def load(base: Base, mask_id: int, is_new: bool, dtype: torch.dtype) -> Any:
    """The model, on a GPU if there is one. The row of a mask token that `is_new` becomes the mean of all."""
    config = stock_config(read_json(base.path / "config.json"))
    with silence():
        model = stock_class(config).from_pretrained(base.path, config=config, dtype=dtype)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if mask_id >= base.rows:
        model.resize_token_embeddings(len(base.tokenizer))
    if is_new:
        table = model.get_input_embeddings().weight.data
        table[mask_id] = table[: base.rows].float().mean(0).to(dtype)
    return model


def with_lora(model: Any, base: Base, mask_id: int, rank: int) -> Any:
    """The model with a LoRA on every linear map, or with that of the base."""
    if base.adapter is not None:
        return PeftModel.from_pretrained(model, base.adapter, is_trainable=True).to(model.dtype)
    name = next(n for n, m in model.named_modules() if m is model.get_input_embeddings()).rpartition(".")[2]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    config.trainable_token_indices = {name: [mask_id]}
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")  # a name that peft still uses
    made = get_peft_model(model, config, autocast_adapter_dtype=False)
    config.base_model_name_or_path = base.name
    return made


def save(model: Any, base: Base, out: Path, block: int | None) -> None:
    """An adapter directory; a whole model after full training, or if the embedding has a new row. The export
    reads the block from tokenizer_config.json."""
    base.tokenizer.init_kwargs["mars_block"] = block
    base.tokenizer.save_pretrained(out)
    if isinstance(model, PeftModel) and model.config.vocab_size != base.rows:
        model = model.merge_and_unload()
    model.save_pretrained(out, save_embedding_layers=False)  # an argument that transformers ignores


Batch = list[tuple[Sequence, list[tuple[int, int]]]]  # sequences with their windows of masks, [start, stop)
HIDDEN = 1 << 40


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences of one forward: T tokens, of which R have an output that is scored. With recurrent layers T
    tokens in rows, without positions and distances."""

    ids: Tensor  # [T], or [rows, T / rows]
    positions: Tensor  # [T] of masks too: those of the tokens in their places
    distances: list[Tensor]  # of each sequence [L, L]: from a query back to a key, or HIDDEN
    outputs: Tensor  # [R]
    targets: Tensor  # [R] the tokens after them
    noisy: Tensor  # [R] bool, the output is a mask's
    kept: Tensor  # [R] bool, of a sequence that learns the base model's probabilities


def grid(sequence: Sequence, width: int, offset: int) -> list[tuple[int, int]]:
    """Windows of `width` masks over an answer, the first one cut to `offset` masks if that is positive. The
    mask at the last place but one predicts the last token."""
    start, last = sequence.start, len(sequence.tokens) - 1
    edges = [start, *range(start + (offset or width), last, width), last] if start < last else []
    return list(pairwise(edges))


def lay_out(batch: Batch, mask_id: int, device: Any = "cpu") -> Pack:
    """Each sequence without its last token, then its windows. A token sees the text before its limit, and its
    own window up to itself."""
    fed: list[tuple[int, int]] = []
    distances: list[Tensor] = []
    scored: list[tuple[int, int, bool, bool]] = []
    for sequence, spans in batch:
        first, tokens = len(fed), sequence.tokens
        fed += [(token, p) for p, token in enumerate(tokens[:-1])]
        sight = [(0, p + 1) for p in range(len(tokens) - 1)]  # the window (0: the text) and the limit
        answer = range(sequence.start, len(tokens))
        scored += [(first + p - 1, tokens[p], False, sequence.kept) for p in answer]
        for window, (start, stop) in enumerate(spans, 1):
            for p in range(start, stop):
                scored.append((len(fed), tokens[p + 1], True, sequence.kept))
                fed.append((mask_id, p))
                sight.append((window, start))
        places = torch.tensor([p for _, p in fed[first:]], device=device)
        windows, limits = torch.tensor(sight, device=device).T
        distance = places[:, None] - places
        seen = (windows == 0) & (places < limits[:, None]) | (windows == windows[:, None]) & (distance >= 0)
        distances.append(distance.where(seen, HIDDEN))
    ids, positions = torch.tensor(fed, device=device).T
    columns = (torch.tensor(column, device=device) for column in zip(*scored, strict=True))
    return Pack(ids, positions, distances, *columns)


def lay_out_rows(batch: Batch, mask_id: int, device: Any = "cpu") -> Pack:
    """A row for each sequence without its last token, then one for each of its windows: the text before the
    window, and its masks. Rows are padded on the right, where nothing is seen by what is before it."""
    rows: list[list[int]] = []
    scored: list[tuple[int, int, int, bool, bool]] = []
    for sequence, spans in batch:
        tokens, answer = sequence.tokens, range(sequence.start, len(sequence.tokens))
        scored += [(len(rows), p - 1, tokens[p], False, sequence.kept) for p in answer]
        rows.append(tokens[:-1])
        for start, stop in spans:
            scored += [(len(rows), p, tokens[p + 1], True, sequence.kept) for p in range(start, stop)]
            rows.append([*tokens[:start], *[mask_id] * (stop - start)])
    size = max(map(len, rows))
    ids = torch.tensor([row + [mask_id] * (size - len(row)) for row in rows], device=device)
    row, place, *columns = (torch.tensor(column, device=device) for column in zip(*scored, strict=True))
    return Pack(ids, torch.empty(0), [], row * size + place, *columns)


def is_recurrent(model: Any) -> bool:
    return "linear_attention" in (getattr(model.config, "layer_types", None) or ())


def forward(model: Any, batch: Batch, mask_id: int) -> tuple[Pack, Tensor]:
    """The layout and the logits of its scored outputs, [R, V] in fp32. The model has `set_attention`."""
    if is_recurrent(model):
        pack = lay_out_rows(batch, mask_id, model.device)
        whole = model.get_base_model() if isinstance(model, PeftModel) else model
        hidden = whole.model(input_ids=pack.ids, use_cache=False).last_hidden_state
        return pack, whole.lm_head(hidden.flatten(0, 1)[pack.outputs]).float()
    pack = lay_out(batch, mask_id, model.device)
    out = model(
        input_ids=pack.ids[None],
        position_ids=pack.positions[None],
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),  # so that transformers makes none
        distances=pack.distances,
        logits_to_keep=pack.outputs,
        use_cache=False,
    )
    return pack, out.logits[0].float()


def by_sequence(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **rest: Any) -> Any:
    """Attention within each sequence of a row, as far back as the layer's sliding window. On a CPU it is in
    fp32, because the backward pass of sdpa is slow in bf16. sdpa has no soft cap (Gemma 2)."""
    dtype = torch.promote_types(query.dtype, torch.float32) if query.device.type == "cpu" else query.dtype
    made, stop = [], 0
    for distance in rest.pop("distances"):
        start, stop = stop, stop + len(distance)
        q, k, v = (t[:, :, start:stop].to(dtype) for t in (query, key, value))
        seen = distance[None, None] < (rest.get("sliding_window") or HIDDEN)
        if rest.get("softcap") is None:
            out = sdpa_attention_forward(module, q, k, v, seen, **rest)[0]
        else:
            out = eager_attention_forward(module, q, k, v, torch.where(seen, 0.0, -torch.inf), **rest)[0]
        made.append(out.to(query.dtype))
    return torch.cat(made, 1), None


AttentionInterface.register("by_sequence", by_sequence)


def set_attention(model: Any) -> None:
    """Attention within each sequence; rows of a model with recurrent layers need nothing."""
    if not is_recurrent(model):
        model.set_attn_implementation("by_sequence")
