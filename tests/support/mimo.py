"""A tiny MiMo: a stock Qwen2 and an MTP layer that is fitted to the model's own text.

The layer is transformers' Qwen2 decoder layer, with the norms and the map that MiMo's published class names;
tests compare the graph with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from support import tiny

TINY = tiny.Tiny("mimo", "qwen2", {"hidden_size": 64, "intermediate_size": 96}, seed=7)
PREFIX = "model.mtp_layers.0."
STEPS = 250  # of fitting: enough for most, not all, of the training text


class MtpLayer(Qwen2DecoderLayer):  # type: ignore[misc]
    """Predicts token t + 2 from the hidden state before the last norm at t, and token t + 1."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        super().__init__(config, 0)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            Qwen2RMSNorm(size, eps=eps) for _ in range(3)
        )
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self._model = [model]  # in a list, so that its weights are not the layer's

    def states(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] before lm_head, of hidden states [b, s, hidden] and the tokens [b, s] after them."""
        [model] = self._model
        places = torch.arange(tokens.shape[1])[None]
        embedded = model.get_input_embeddings()(tokens) * (places > 0)[..., None]
        pair = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1)
        ahead = torch.full((len(places[0]), len(places[0])), -torch.inf).triu(1)[None, None]
        made = super().forward(
            self.input_proj(pair),
            attention_mask=ahead,
            position_ids=places,
            position_embeddings=model.model.rotary_emb(pair, places),
        )
        return self.final_layernorm(made)

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that the layer proposes after `tokens`, whose last one is not yet fed."""
        [model] = self._model
        with torch.inference_mode():
            hidden, known, drafted = hidden_states(model, [tokens[:-1]]), list(tokens[1:]), []
            for _ in range(count):
                made = self.states(hidden, torch.tensor([known]))[:, -1:]
                drafted.append(int(model.lm_head(made)[0, -1].argmax()))
                hidden, known = torch.cat([hidden, made], 1), [*known, drafted[-1]]
            return drafted


def hidden_states(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """[b, s, hidden], the input of the last norm."""
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([list(row) for row in rows]), use_cache=False)
    hook.remove()
    return seen[0]


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The stock model's one-token text after `prompt`."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def fitted(model: PreTrainedModel, prompts: Sequence[Sequence[int]], length: int) -> MtpLayer:
    """A layer that knows the greedy text of `prompts`, rows of `length` tokens with them; seeded."""
    torch.manual_seed(3)
    layer = MtpLayer(model)
    for name, weight in layer.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(weight, 0.7, 1.3)
    rows = torch.tensor([[*prompt, *greedy(model, prompt, length - len(prompt))] for prompt in prompts])
    hidden, head = hidden_states(model, rows.tolist())[:, :-2], model.lm_head.weight.detach()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(STEPS):
        logits = layer.states(hidden, rows[:, 1:-1]) @ head.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer.eval().requires_grad_(False)


def write(directory: Path, prompts: Sequence[Sequence[int]], length: int) -> MtpLayer:
    """Write the checkpoint, and return its layer."""
    model = tiny.build(TINY)
    tiny.save(model, directory)
    tiny.without_mask(directory)
    layer = fitted(model, prompts, length)
    path = directory / "model.safetensors"
    extra = {f"{PREFIX}{name}": value.contiguous() for name, value in layer.state_dict().items()}
    save_file(load_file(path) | extra, path, {"format": "pt"})
    tiny.change_config(
        directory, model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1,
        auto_map={"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "mimo.MiMo"},
    )  # fmt: skip
    return layer
