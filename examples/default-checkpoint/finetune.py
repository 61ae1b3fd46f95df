"""Trains the MARS adapter: two streams, LoRA, AdamW, cosine. Resumable, seeded; writes checkpoints and the
adapter."""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import dataset
import export_adapter
import torch
import torch.nn.functional as F
from model import MASK_ID, WINDOW, Sequence2, TwoStream, lay_out, windows
from tokenizers import Tokenizer
from torch import distributed, multiprocessing

NOISY_STREAMS = {
    "assistant": 1,
    "arithmetic": 1,
    "chat": 1,
    "smalltalk": 1,
}  # masked copies per example, each on its own grid
# Free text is taken only a few tokens at a time: what a mask far into the window predicts is rarely reached.
DECAY = {"assistant": 1.0, "arithmetic": 1.0, "chat": 0.8, "smalltalk": 1.0}


def batches(tokenizer: Tokenizer, args: argparse.Namespace, skip: int):
    """Batches of laid-out sequences from the mixture, starting after the first `skip` examples."""
    stream = islice(dataset.mixture(tokenizer, f"train-{args.seed}", dataset.SHARES), skip, None)
    index = skip
    while True:
        batch = []
        for task, tokens, prompt in islice(stream, args.batch):
            rng = random.Random(f"grid:{args.seed}:{index}")
            offsets = rng.sample(range(WINDOW), NOISY_STREAMS[task])
            spans = [span for offset in offsets for span in windows(prompt, len(tokens), offset)]
            laid_out = lay_out(tokens, prompt, spans, DECAY[task])
            batch.append(replace(laid_out, taught=task == "chat"))
            index += 1
        yield batch


class Candidates:
    """The ids a softmax is taken over: every id the task data uses, the batch's own, and fresh random ones
    each step.

    A full softmax is a fifth of the training time on a CPU. The random ids keep the rest of the vocabulary
    from drifting up.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, seed: int) -> None:
        stream = dataset.mixture(tokenizer, f"vocabulary-{seed}", dataset.SHARES)
        self.common = torch.tensor(
            sorted({token for _, tokens, prompt in islice(stream, 4000) for token in tokens[prompt:]})
        )
        self.size, self.random, self.seed = size, 8192, seed

    def draw(self, targets: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of this step, and the targets as indices into them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        fresh = torch.randint(0, self.size, (self.random,), generator=generator)
        ids = torch.cat((self.common, targets, fresh)).unique()  # sorted
        ids = ids[ids != MASK_ID]
        return ids, torch.searchsorted(ids, targets)


def losses(
    model: TwoStream, batch: list[Sequence2], candidates: Candidates, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean cross-entropy of the clean and of the noisy rows; of clean rows of chat the
    divergence from the base model's probabilities."""
    ids, targets = candidates.draw(torch.cat([s.targets for s in batch]), step)
    noisy = torch.cat([s.noisy for s in batch])
    logits = model(batch, ids)
    each = F.cross_entropy(logits, targets, reduction="none") * torch.cat([s.weights for s in batch])
    learners = [s for s in batch if s.taught]
    if learners:
        taught = torch.cat([torch.full_like(s.noisy, s.taught) for s in batch]) & ~noisy
        teacher = model.base(learners, ids).log_softmax(-1)
        divergence = F.kl_div(logits[taught].log_softmax(-1), teacher, reduction="none", log_target=True).sum(
            -1
        )
        each = each.masked_scatter(taught, divergence)
    return each[~noisy].mean(), each[noisy].mean()


class Run:
    """What a training run has to remember between restarts."""

    def __init__(self, model: TwoStream, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        loras = [p for n, p in model.named_parameters() if n != "mask_row"]
        self.optimizer = torch.optim.AdamW(
            [{"params": loras, "peak": args.lr}, {"params": [model.mask_row], "peak": args.mask_lr}],
            weight_decay=0.0,
            betas=(0.9, 0.99),
        )
        self.step = self.examples = self.tokens = 0
        self.seconds = self.progress = 0.0

    def save(self) -> None:
        path = self.args.out / "checkpoint.pt"
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "examples": self.examples,
            "tokens": self.tokens, "seconds": self.seconds, "progress": self.progress,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self) -> None:
        state = torch.load(self.args.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, peak in zip(self.optimizer.param_groups, (self.args.lr, self.args.mask_lr), strict=True):
            group["peak"] = peak  # what was asked for now, not then
        self.step, self.examples, self.tokens = state["step"], state["examples"], state["tokens"]
        self.seconds, self.progress = state["seconds"], state["progress"]

    def rate(self) -> float:
        warm = min(1.0, (self.step + 1) / self.args.warmup)
        return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress))))


def share(batch: list[Sequence2], rank: int, ranks: int) -> list[Sequence2]:
    """The sequences of one process: by length, dealt back and forth, so that the processes finish
    together."""
    ordered = sorted(batch, key=lambda s: -len(s.ids))
    return [s for i, s in enumerate(ordered) if i % (2 * ranks) in (rank, 2 * ranks - 1 - rank)]


def work(rank: int, args: argparse.Namespace) -> None:
    """One process of the run. Each takes its share of every batch; gradients are averaged; all make the same
    update."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    distributed.init_process_group(
        "gloo", init_method=f"file://{args.out / 'rendezvous'}", rank=rank, world_size=args.ranks
    )
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    model = TwoStream(args.base, args.rank, args.alpha, getattr(torch, args.dtype))
    candidates = Candidates(tokenizer, len(model.embedding), args.seed)
    if args.adapter is not None:
        export_adapter.read(model, args.adapter)
    run = Run(model, args)
    if (args.out / "checkpoint.pt").exists():
        run.load()
        if rank == 0:
            print(f"resumed at step {run.step}, {run.tokens} tokens", flush=True)
    stopping: list[int] = []
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.append(1))
    began, progress0, saved = time.time(), run.progress, time.time()
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    for batch in batches(tokenizer, args, run.examples):
        tick = time.time()
        for group in run.optimizer.param_groups:
            group["lr"] = group["peak"] * run.rate()
        run.optimizer.zero_grad()
        clean = noisy = 0.0
        mine = share(batch, rank, args.ranks)
        parts = [mine[i : i + args.micro] for i in range(0, len(mine), args.micro)]
        for part in parts:
            part_clean, part_noisy = losses(model, part, candidates, run.step)
            ((part_clean + part_noisy) / len(parts)).backward()
            clean, noisy = clean + part_clean.item() / len(parts), noisy + part_noisy.item() / len(parts)
        # One exchange a step: the gradients, and what all processes must agree on.
        spoken = torch.tensor(
            [clean, noisy, float(bool(stopping)), time.time() - began if rank == 0 else 0.0]
        )
        flat = torch.cat([*(p.grad.reshape(-1) for p in trained), spoken])
        distributed.all_reduce(flat)
        flat /= args.ranks
        for p, grad in zip(trained, flat[:-4].split([p.numel() for p in trained]), strict=True):
            p.grad.copy_(grad.view_as(p))
        clean, noisy, stop, elapsed = flat[-4:].tolist()
        elapsed *= args.ranks
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        run.optimizer.step()
        now = time.time()
        count = sum(int((~s.noisy).sum()) for s in batch)
        run.step, run.examples, run.tokens, run.seconds = (
            run.step + 1,
            run.examples + len(batch),
            run.tokens + count,
            run.seconds + now - tick,
        )
        if args.until:
            run.progress = progress0 + (1 - progress0) * elapsed / max(1.0, args.until - began)
        else:
            run.progress = run.tokens / args.tokens
        if rank == 0:
            print(
                f"step {run.step} tokens {run.tokens} {count / (now - tick):.0f} tok/s"
                f" clean {clean:.3f} noisy {noisy:.3f} norm {norm.item():.2f} lr {run.rate():.3f}"
                f" progress {run.progress:.3f} {time.strftime('%H:%M:%S')}",
                flush=True,
            )
        ending = stop > 0 or run.progress >= 1 or run.step >= args.steps
        if rank == 0 and (ending or now - saved > args.save_every):
            run.save()
            saved = now
        if ending:
            break
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--adapter",
        type=Path,
        help="start from this adapter instead of from nothing; give another --seed with it",
    )
    parser.add_argument(
        "--tokens", type=int, default=350_000, help="response tokens of the whole run; sets the schedule"
    )
    parser.add_argument(
        "--until", type=float, help="unix time at which the schedule ends, instead of --tokens"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro", type=int, default=4, help="sequences per forward; bounds the memory")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mask-lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--rank", type=int, default=32, help="of the LoRA maps")
    parser.add_argument("--alpha", type=float, default=64.0)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the products; trained matrices stay fp32. bfloat16 pays on CPUs with avx512_bf16 or AMX",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes; one a core beats threads when the cores are shared"
    )
    parser.add_argument("--threads", type=int, default=1, help="per process")
    parser.add_argument("--save-every", type=float, default=300.0)
    parser.add_argument("--steps", type=int, default=10**9, help="stop early after this many steps (timing)")
    args = parser.parse_args()
    args.out = args.out.resolve()  # a file:// address has no relative paths
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    processes = multiprocessing.spawn(work, (args,), args.ranks, join=False)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: [p.terminate() for p in processes.processes])
    while not processes.join():
        pass


if __name__ == "__main__":
    main()
