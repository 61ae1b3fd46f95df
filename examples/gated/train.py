"""Trains a draft adapter for the stock model: a LoRA that acts at draft slots only. Resumable, seeded.

The clean stream is the stock model's and has no gradient. Windows of draft slots attend to its keys and
values of the tokens before them, and to their own slots.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "default-checkpoint"))

import dataset
import export_adapter
from model import MASK_ID, PROJECTIONS, Lora, TwoStream, attend, rotate
from safetensors.torch import load_file, save_file

DRAFTS = 3  # slots of a window
DECAY = 0.8  # weight of a slot's loss over that of the slot before it
RANDOM_IDS = 4096  # ids of the softmax beside those that the answers use


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of a prompt and the stock model's answer; `starts` are the first positions of windows.

    The draft slot at position q predicts tokens[q + 1], knowing the tokens below its window's start.
    """

    tokens: list[int]
    prompt: int  # tokens of the prompt
    starts: list[int]

    def targets(self) -> Tensor:
        """[windows, DRAFTS]; -100 after the end of the answer."""
        padded = [*self.tokens, *[-100] * DRAFTS]
        return torch.tensor([padded[start + 1 : start + 1 + DRAFTS] for start in self.starts])


def rows(path: Path, tokenizer: Tokenizer) -> list[Row]:
    """Rows of answers.py, with a window at every place of the answer."""
    read: list[Row] = []
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        prompt = tokenizer.encode(dataset.prompt(answer["messages"]), add_special_tokens=False).ids
        tokens = [*prompt, *answer["tokens"]]
        if len(answer["tokens"]) > 1:
            read.append(Row(tokens, len(prompt), [*range(len(prompt), len(tokens) - 1)]))
    return read


class Drafter(TwoStream):
    """The frozen stock model, and a LoRA for draft slots."""

    def __init__(self, base: Path, rank: int, alpha: float, dtype: torch.dtype) -> None:
        super().__init__(base, rank, alpha, dtype)
        del self.mask_row
        self.mask_row = self.embedding[MASK_ID]  # the stock row, not trained
        self.loras = [m for m in self.modules() if isinstance(m, Lora)]

    def gate(self, on: bool) -> None:
        for lora in self.loras:
            lora.off = not on

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [T, 1, D]."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def entries(self, batch: Sequence[Row]) -> list[list[tuple[Tensor, Tensor]]]:
        """Keys and values of the stock model, [T, K, D], by layer and row."""
        self.gate(False)
        lengths = [len(row.tokens) for row in batch]
        cos, sin = self.angles(torch.cat([torch.arange(length) for length in lengths]))
        bias = [torch.full((n, n), float("-inf"), dtype=self.dtype).triu(1) for n in lengths]
        x = self.embedding[torch.tensor([token for row in batch for token in row.tokens])]
        kept: list[list[tuple[Tensor, Tensor]]] = []
        for layer in self.layers:
            h = F.rms_norm(x, x.shape[-1:], layer.norm_in, layer.eps).to(self.dtype)
            q, k, v = project(layer, h, cos, sin)
            split = [*zip(q.split(lengths), k.split(lengths), v.split(lengths), bias, strict=True)]
            kept.append([(ks, vs) for _, ks, vs, _ in split])
            x = finish(layer, x, torch.cat([attend(*part) for part in split]))
        return kept

    def drafts(self, batch: Sequence[Row], vocabulary: Tensor | None = None) -> Tensor:
        """Logits at the draft slots of every row, [sum of windows * DRAFTS, vocabulary]."""
        kept = self.entries(batch)
        self.gate(True)
        starts = [torch.tensor(row.starts) for row in batch]
        counts = [len(s) * DRAFTS for s in starts]
        cos, sin = self.angles((torch.cat(starts)[:, None] + torch.arange(DRAFTS)).reshape(-1))
        later = torch.full((DRAFTS, DRAFTS), float("-inf")).triu(1)
        hidden = []
        for row, s in zip(batch, starts, strict=True):
            known = torch.arange(len(row.tokens)) < s.repeat_interleave(DRAFTS)[:, None]
            hidden.append(torch.zeros(known.shape).masked_fill_(~known, float("-inf")))
        x = self.mask_row.expand(sum(counts), -1)
        for layer, entries in zip(self.layers, kept, strict=True):
            h = F.rms_norm(x, x.shape[-1:], layer.norm_in, layer.eps).to(self.dtype)
            q, k, v = project(layer, h, cos, sin)
            split = zip(q.split(counts), k.split(counts), v.split(counts), entries, hidden, strict=True)
            mixed = [attend_window(qs, ks, vs, *kv, bias, later) for qs, ks, vs, kv, bias in split]
            x = finish(layer, x, torch.cat(mixed))
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        table = self.embedding if vocabulary is None else self.embedding[vocabulary]
        return F.linear(x.to(self.dtype), table.to(self.dtype)).float()


def project(layer: torch.nn.Module, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, K, D]."""
    q = rotate(layer.maps["q_proj"](h).view(-1, layer.heads, layer.width), cos, sin)
    k = rotate(layer.maps["k_proj"](h).view(-1, layer.kv_heads, layer.width), cos, sin)
    return q, k, layer.maps["v_proj"](h).view(-1, layer.kv_heads, layer.width)


def finish(layer: torch.nn.Module, x: Tensor, mixed: Tensor) -> Tensor:
    """What follows attention in a layer."""
    x = x + layer.maps["o_proj"](mixed)
    h = F.rms_norm(x, x.shape[-1:], layer.norm_mid, layer.eps).to(mixed.dtype)
    return x + layer.maps["down_proj"](F.silu(layer.maps["gate_proj"](h)) * layer.maps["up_proj"](h))


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, clean_k: Tensor, clean_v: Tensor, bias: Tensor, later: Tensor
) -> Tensor:
    """Attention of one row's draft slots, [N, H * D]: to the clean entries ([T, K, D]) that `bias` [N, T]
    leaves, and to the slots of their own window; q [N, H, D], k and v [N, K, D]."""
    count, _, width = q.shape
    kv_heads, windows = k.shape[1], count // DRAFTS
    q = (q * width**-0.5).view(count, kv_heads, -1, width).permute(1, 2, 0, 3)  # [K, G, N, D]
    groups = q.shape[1]
    clean = torch.bmm(q.reshape(kv_heads, -1, width), clean_k.permute(1, 2, 0))
    clean = clean.view(kv_heads, groups, count, -1) + bias
    ours = q.reshape(kv_heads, groups, windows, DRAFTS, width)
    own_k = k.view(windows, DRAFTS, kv_heads, width).permute(2, 0, 3, 1)[:, None]  # [K, 1, W, D, n]
    own_v = v.view(windows, DRAFTS, kv_heads, width).permute(2, 0, 1, 3)[:, None]
    own = (ours @ own_k + later).view(kv_heads, groups, count, DRAFTS)
    weights = torch.cat((clean, own), -1).softmax(-1, dtype=torch.float32).to(v.dtype)
    to_clean, to_own = weights.split((clean.shape[-1], DRAFTS), -1)
    out = torch.bmm(to_clean.reshape(kv_heads, groups * count, -1), clean_v.transpose(0, 1))
    out = out.view(kv_heads, groups, count, width)
    out = out + (to_own.reshape(kv_heads, groups, windows, DRAFTS, DRAFTS) @ own_v).view_as(out)
    return out.permute(2, 0, 1, 3).reshape(count, -1)


@torch.no_grad()
def start_from(model: Drafter, adapter: Path, rank: int) -> None:
    """The adapter's LoRA maps, cut to `rank` by SVD."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    stored = load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for name, parameter in model.named_parameters():
        if name.endswith(".b"):
            continue
        b = stored[export_adapter.peft_name(name[:-1] + "b")].float()
        qb, rb = torch.linalg.qr(b * scale / model.alpha * rank)
        qa, ra = torch.linalg.qr(stored[export_adapter.peft_name(name)].float().T)
        u, s, v = torch.linalg.svd(rb @ ra.T)
        root = s[:rank].sqrt()
        parameter.copy_((qa @ v.T[:, :rank] * root).T)
        model.get_parameter(name[:-1] + "b").copy_(qb @ u[:, :rank] * root)


def write(model: Drafter, out: Path) -> None:
    """The adapter directory as PEFT writes it, fp16."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": export_adapter.BASE_NAME,
        "bias": "none", "lora_alpha": model.alpha, "r": model.rank, "lora_dropout": 0.0,
        "target_modules": [projection.split(".")[1] for projection in PROJECTIONS],
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(export_adapter.tensors(model.state_dict()), out / "adapter_model.safetensors", {"format": "pt"})


def batches(examples: list[Row], size: int, stride: int, seed: int, skip: int) -> Iterator[list[Row]]:
    """Endless batches, every `stride`-th window of a row; another order and other windows in each epoch."""
    index = 0
    for epoch in range(10**6):
        rng = random.Random(f"{seed}:{epoch}")
        order = rng.sample(range(len(examples)), len(examples))
        for first in range(0, len(order) - size + 1, size):
            index += 1
            if index > skip:
                drawn = [examples[i] for i in order[first : first + size]]
                yield [
                    replace(row, starts=row.starts[epoch % stride :: stride] or row.starts) for row in drawn
                ]


def forwards(held: list[int], length: int, drafts: int) -> int:
    """Forwards of exact mode for `length` tokens; held: the right drafts of the window at each place.

    A forward without draft tokens gives one sure token and drafts after it. One that verifies them has the
    next drafts only if all of them held.
    """
    start, known, spent = 0, 1, 1
    while known < length:
        good = min(held[start], drafts) if start < len(held) else 0
        start, known, spent = start + 1 + drafts, start + 2 + good, spent + 1
        if good < drafts and known < length:
            start, known, spent = known, known + 1, spent + 1
    return spent


@torch.inference_mode()
def check(model: Drafter, examples: list[Row]) -> str:
    """Along the answers: the share of right drafts by depth, and tokens a forward by the drafts of a step."""
    hits, counts = torch.zeros(DRAFTS), torch.zeros(DRAFTS)
    tokens, spent = 0, [0] * DRAFTS
    for row in examples:
        targets = row.targets()
        right = model.drafts([row]).argmax(-1).view(-1, DRAFTS) == targets
        hits, counts = hits + right.sum(0), counts + (targets >= 0).sum(0)
        held = right.long().cumprod(-1).sum(-1).tolist()
        length = len(row.tokens) - row.prompt
        tokens += length
        spent = [total + forwards(held, length, m) for m, total in enumerate(spent, 1)]
    shares = " ".join(f"{100 * share:.1f}" for share in (hits / counts).tolist())
    return f"right {shares} % tokens/forward {' '.join(f'{tokens / total:.3f}' for total in spent)}"


class Run:
    """What a run has to remember between restarts."""

    def __init__(self, model: Drafter, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.step = self.slots = 0
        self.progress = 0.0

    def save(self) -> None:
        path = self.args.out / "checkpoint.pt"
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "slots": self.slots, "progress": self.progress,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        write(self.model, self.args.out / "adapter")

    def load(self) -> None:
        state = torch.load(self.args.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.slots, self.progress = state["step"], state["slots"], state["progress"]

    def rate(self) -> float:
        warm = min(1.0, (self.step + 1) / self.args.warmup)
        return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress))))


def train(run: Run, examples: list[Row]) -> None:
    """Runs until the schedule ends, or until a signal."""
    model, args = run.model, run.args
    common = torch.tensor(sorted({token for row in examples for token in row.tokens[row.prompt :]}))
    falling = DECAY ** torch.arange(DRAFTS).float()
    stopping: list[int] = []
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.append(1))
    began, progress0, saved = time.time(), run.progress, time.time()
    hits, counts = torch.zeros(DRAFTS), torch.zeros(DRAFTS)
    for batch in batches(examples, args.batch, args.stride, args.seed, run.step):
        tick = time.time()
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + run.step)
        fresh = torch.randint(0, len(model.embedding), (RANDOM_IDS,), generator=generator)
        ids = torch.cat((common, fresh)).unique()
        targets = torch.cat([row.targets() for row in batch])
        present = targets >= 0
        scored = torch.searchsorted(ids, targets.clamp(min=0))
        logits = model.drafts(batch, ids)
        each = F.cross_entropy(logits, scored.view(-1), reduction="none").view_as(targets)
        weights = present * falling
        loss = (each * weights).sum() / weights.sum()
        run.optimizer.param_groups[0]["lr"] = args.lr * run.rate()
        run.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        right = (logits.argmax(-1).view_as(targets) == scored) & present
        hits, counts = 0.97 * hits + right.sum(0), 0.97 * counts + present.sum(0)
        shares = " ".join(f"{100 * share:.1f}" for share in (hits / counts).tolist())
        run.step, run.slots = run.step + 1, run.slots + int(present.sum())
        now = time.time()
        run.progress = progress0 + (1 - progress0) * (now - began) / max(1.0, args.until - began)
        print(
            f"step {run.step} slots {run.slots} {present.sum() / (now - tick):.0f} slots/s loss {loss:.3f}"
            f" right {shares} norm {norm:.2f} lr {run.rate():.3f} {time.strftime('%H:%M:%S')}",
            flush=True,
        )
        ending = bool(stopping) or run.progress >= 1
        if ending or now - saved > args.save_every:
            run.save()
            saved = now
        if ending:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="of answers.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="measure RUN on the answers instead of training")
    parser.add_argument("--start", type=Path, help="start from this adapter, cut to the rank by SVD")
    parser.add_argument("--until", type=float, default=0.0, help="unix time at which the schedule ends")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--stride", type=int, default=2, help="use every n-th window in an epoch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=180.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    model = Drafter(args.base, args.rank, args.alpha, getattr(torch, args.dtype))
    examples = rows(args.answers, Tokenizer.from_file(str(args.base / "tokenizer.json")))
    run = Run(model, args)
    if (args.out / "checkpoint.pt").exists():
        run.load()
    elif args.start is not None:
        start_from(model, args.start, args.rank)
    print(check(model, examples)) if args.check else train(run, examples)


if __name__ == "__main__":
    main()
