"""A tiny Qwen3.5 with an MTP layer that is fitted to the model's own text.

The layer is plain torch, written after the description of vLLM and of the names and shapes of the published
files; tests compare the graph with it. It reads hidden states after the last norm, and its norms are stored
minus one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from support import families, tiny

_KINDS = ["linear_attention"] * 3 + ["full_attention"]
TINIES = {
    made.name: made
    for made in (
        tiny.Tiny("qwen-mtp", "qwen3_5_text", families.SIZES | {"linear_value_head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": _KINDS}, seed=4),
        tiny.Tiny("qwen-mtp-tied", "qwen3_5_text", families.SIZES | {"linear_value_head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 2, "layer_types": _KINDS}, tied=True, seed=5),
    )
}  # fmt: skip


class Layer(nn.Module):
    """Predicts token t + 2 from the hidden state at t and token t + 1."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        size, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        shapes = {
            "fc": (size, 2 * size), "pre_fc_norm_embedding": (size,), "pre_fc_norm_hidden": (size,),
            "norm": (size,), "layers.0.input_layernorm": (size,),
            "layers.0.post_attention_layernorm": (size,), "layers.0.self_attn.q_proj": (2 * heads * d, size),
            "layers.0.self_attn.k_proj": (kv_heads * d, size),
            "layers.0.self_attn.v_proj": (kv_heads * d, size),
            "layers.0.self_attn.o_proj": (size, heads * d), "layers.0.self_attn.q_norm": (d,),
            "layers.0.self_attn.k_norm": (d,), "layers.0.mlp.gate_proj": (inner, size),
            "layers.0.mlp.up_proj": (inner, size), "layers.0.mlp.down_proj": (size, inner),
        }  # fmt: skip
        torch.manual_seed(3)
        for name, shape in shapes.items():
            started = torch.randn(shape) * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(started))
        self.names = list(shapes)
        self._model = [model]  # in a list, so that its weights are not the layer's

    @property
    def model(self) -> PreTrainedModel:
        return self._model[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in a checkpoint."""
        return {f"mtp.{name}.weight": self._w(name).detach().contiguous() for name in self.names}

    def _w(self, name: str) -> torch.Tensor:
        found: torch.Tensor = getattr(self, name.replace(".", "_"))
        return found

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + self._w(name))

    def states(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] before lm_head, of hidden states [b, s, hidden] and the tokens [b, s] after them."""
        model = self.model
        pair = (
            self._norm(model.get_input_embeddings()(tokens), "pre_fc_norm_embedding"),
            self._norm(hidden, "pre_fc_norm_hidden"),
        )
        x = torch.cat(pair, -1) @ self._w("fc").T
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        y = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (y @ self._w(f"layers.0.mlp.{name}_proj").T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ self._w("layers.0.mlp.down_proj").T
        return self._norm(x, "norm")

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        config, part = self.model.config, "layers.0.self_attn."
        d, s = config.head_dim, x.shape[1]
        q, gate = (x @ self._w(f"{part}q_proj").T).unflatten(-1, (-1, 2, d)).unbind(-2)
        k, v = ((x @ self._w(f"{part}{name}_proj").T).unflatten(-1, (-1, d)) for name in "kv")
        q, k = self._norm(q, f"{part}q_norm"), self._norm(k, f"{part}k_norm")
        turning = int(d * config.rope_parameters["partial_rotary_factor"])
        rates = config.rope_parameters["rope_theta"] ** (-torch.arange(0, turning, 2) / turning)
        angles = (torch.arange(s)[:, None] * rates)[:, None]  # [s, 1, turning / 2]

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x[..., :turning].chunk(2, -1)
            sin, cos = angles.sin(), angles.cos()
            return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., turning:]], -1)

        q, k, v = (x.transpose(1, 2) for x in (turned(q), turned(k), v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        ahead = torch.full((s, s), -torch.inf).triu(1)
        mixed = torch.softmax(q @ k.mT * d**-0.5 + ahead, -1) @ v
        return (mixed.transpose(1, 2) * gate.sigmoid()).flatten(2) @ self._w(f"{part}o_proj").T

    def drafts(self, tokens: Sequence[int], count: int, among: Sequence[int] = ()) -> list[int]:
        """The tokens of `among`, or of all, that the layer proposes after `tokens`, whose last one is not yet
        fed.
        """
        model = self.model
        with torch.inference_mode():
            hidden, known, drafted = normed_states(model, [tokens[:-1]]), list(tokens[1:]), []
            for _ in range(count):
                made = self.states(hidden, torch.tensor([known]))[:, -1:]
                logits = model.lm_head(made)[0, -1]
                if among:
                    others = torch.ones_like(logits, dtype=torch.bool)
                    others[list(among)] = False
                    logits[others] = -torch.inf
                drafted.append(int(logits.argmax()))
                hidden, known = torch.cat([hidden, made], 1), [*known, drafted[-1]]
            return drafted


def normed_states(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """[b, s, hidden], the output of the last norm."""
    with torch.no_grad():
        found: torch.Tensor = model.model(torch.tensor([[*row] for row in rows])).last_hidden_state
        return found


def greedy(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The stock model's one-token texts, of prompts of one length."""
    rows = torch.tensor([[*prompt] for prompt in prompts])
    made = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=count, do_sample=False,
                          eos_token_id=None, pad_token_id=tiny.ENDOFTEXT)  # fmt: skip
    return [row[rows.shape[1] :].tolist() for row in made]


def fitted(model: PreTrainedModel, rows: torch.Tensor, steps: int, batch: int = 64) -> Layer:
    """A layer that is trained on texts [n, s]; seeded. Its first three outputs are trained, each from the one
    before, as a step applies it.
    """
    layer, head = Layer(model), model.lm_head.weight.detach()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-4)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = rows[torch.randint(len(rows), (min(batch, len(rows)),), generator=draw)]
        hidden, loss = normed_states(model, chosen.tolist()), torch.zeros(())
        for ahead in range(1, 4):
            end = chosen.shape[1] - ahead - 1
            hidden = layer.states(hidden[:, :end], chosen[:, ahead : ahead + end])
            wanted = chosen[:, ahead + 1 : ahead + 1 + end]
            loss = loss + F.cross_entropy((hidden @ head.T).flatten(0, 1), wanted.flatten()) / ahead
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return layer.eval().requires_grad_(False)


def cuts(ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Pieces [count, length] of a text; seeded."""
    draw = torch.Generator().manual_seed(count)
    starts = torch.randint(len(ids) - length, (count,), generator=draw)
    return torch.stack([ids[start : start + length] for start in starts])


def trained(ids: torch.Tensor, steps: int) -> PreTrainedModel:
    """A model that is trained on a text; seeded."""
    model, rate = tiny.build(TINIES["qwen-mtp"]), 4e-3
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.05)
    for rows in cuts(ids, 24 * steps, 64).split(24):
        logits = model(rows).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.requires_grad_(False)


def write(directory: Path, name: str, prompts: Sequence[Sequence[int]], length: int) -> Layer:
    """Write the checkpoint. Its layer knows the greedy texts of `prompts`, of `length` tokens with them."""
    model = tiny.build(TINIES[name])
    rows = [[*prompt, *greedy(model, [prompt], length - len(prompt))[0]] for prompt in prompts]
    layer = fitted(model, torch.tensor(rows), 100)
    save(directory, model, layer)
    return layer


def save(directory: Path, model: PreTrainedModel, layer: Layer) -> None:
    """Write the checkpoint, in the form of a text model."""
    tiny.save(model, directory)
    tiny.without_mask(directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | layer.tensors(), path, {"format": "pt"})
    tiny.change_config(directory, mtp_num_hidden_layers=1)
