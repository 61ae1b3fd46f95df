"""Fine-tunes a stock causal language model by the method of MARS, so that it predicts several tokens a step.

Each forward reads the text as it is and windows of masks over its answers; the loss is the mean cross-entropy
of both. Ctrl-C stops; the same command continues.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from base import Base, choose_mask, load, open_base, save, with_lora
from measure import score, table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rows import BadRows, Row, Sequence, ask, encode_all, read
from streams import forward, grid
from torch import Tensor

STATE = "training.pt"
NOT_SETTINGS = ("out", "hours", "epochs", "pack", "checkpointing", "threads")  # may change between restarts
console = Console()


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--base", help="directory or hub id of the stock model (default: SmolLM2-135M-Instruct, from PyPI)")
    add("--rows", type=Path, help="JSONL rows with answers, which the model learns")
    add("--keep", type=Path, help="JSONL rows on which it stays the base model, which answers them if needed")
    add("--out", type=Path, required=True, help="directory of the result")
    add("--full", action="store_true", help="train all weights instead of a LoRA")
    add("--rank", type=int, default=32, help="of the LoRA (default %(default)s)")
    add("--adapter", type=Path, help="begin with this LoRA")
    add("--block", type=int, default=8, help="predictions of a forward (default %(default)s)")
    add("--hours", type=float, help="end after this time of training")
    add("--epochs", type=float, help="end after these passes over the rows (default 3, with --hours none)")
    add("--batch", type=int, default=8, help="answers of an update (default %(default)s)")
    add("--pack", type=int, help="tokens of a forward, which bounds the memory (default 768; 4096 on a GPU)")
    add("--checkpointing", action="store_true", help="compute activations twice instead of storing them")
    add("--lr", type=float, help="learning rate (default 5e-4; 1e-5 with --full)")
    add("--held-out", default="0.1", help="part of --rows, or a file, for the table at the end (default 0.1)")
    add("--max-length", type=int, default=2048, help="most tokens of a context and answer")
    add("--mask-token", help="the token that masks are (default: a reserved one, else a new one)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--threads", type=int, help="CPU threads (default: a thread a core)")
    add("--seed", type=int, default=0)
    add("--one-token", action="store_true", help="ordinary fine-tuning without masks, to compare with")
    args = parser.parse_args(arguments)
    if not (args.rows or args.keep) or args.block < 2 or args.batch < 1 or (args.full and args.adapter):
        parser.error("give --rows or --keep, --block >= 2 and --batch >= 1; --adapter excludes --full")
    args.epochs = args.epochs or (math.inf if args.hours else 3)
    return args


def read_rows(args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Rows to train with, and held-out ones. Raises BadRows with all that is wrong."""
    problems: list[str] = []
    rows = read(args.rows, False, problems) if args.rows else []
    kept = read(args.keep, True, problems) if args.keep else []
    if Path(args.held_out).is_file():
        held = read(Path(args.held_out), False, problems)
    else:
        try:
            count = round(float(args.held_out) * len(rows))
        except ValueError:
            count = -1
        if not 0 <= count <= len(rows):
            problems.append(f"--held-out {args.held_out}: neither a file nor a part from 0 to 1")
        order = random.Random(args.seed).sample(rows, len(rows))
        held, rows = order[:count], order[count:]
    if problems:
        raise BadRows("\n".join(problems))
    return rows + kept, held


def complete(rows: list[Row], base: Base, model: Any, path: Path) -> None:
    """Adds the base model's greedy answers to rows without one. `path` stores them."""
    done = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
    open_rows = [row for row in rows if not row.is_answered]
    for number, row in enumerate(open_rows, 1):
        text = ask(row.messages, base.tokenizer) if row.prompt is None else row.prompt
        if text not in done:
            ids = base.tokenizer(text, add_special_tokens=row.prompt is not None, return_tensors="pt")
            out = model.generate(**ids.to(model.device), max_new_tokens=128, do_sample=False)
            new = out[0, ids.input_ids.shape[1] :].tolist()
            done[text] = base.tokenizer.decode(new, skip_special_tokens=True), new[-1] in base.ends
            with path.open("a") as sink:
                sink.write(json.dumps([text, done[text]]) + "\n")
            console.print(f"the base answered row {number} of {len(open_rows)}")
        answer, row.raw["finished"] = done[text]
        row.messages.append({"role": "assistant", "content": answer})


def batches(sequences: list[Sequence], args: argparse.Namespace, step: int) -> Iterator[list[list]]:
    """Endless batches from a step on, in parts of at most `--pack` tokens: sequences and their windows, in
    another order and on another grid in each epoch."""
    in_epoch = math.ceil(len(sequences) / args.batch)
    while True:
        epoch, place = divmod(step, in_epoch)
        order = random.Random(f"{args.seed}:{epoch}").sample(range(len(sequences)), len(sequences))
        chosen = order[place * args.batch : (place + 1) * args.batch]
        parts: list[list] = []
        tokens = math.inf
        for index in sorted(chosen, key=lambda i: len(sequences[i].tokens)):
            sequence, width = sequences[index], args.block - 1
            offset = random.Random(f"{args.seed}:{epoch}:{index}").randrange(width)
            spans = [] if args.one_token else grid(sequence, width, offset)
            size = len(sequence.tokens) + sum(stop - start for start, stop in spans)
            if tokens + size > args.pack:
                parts, tokens = [*parts, []], 0
            parts[-1].append((sequence, spans))
            tokens += size
        yield parts
        step += 1


def losses(model: Any, teacher: Any, part: list, mask_id: int) -> tuple[Tensor, Tensor]:
    """Summed losses of the clean outputs and of the masks. Clean outputs of kept sequences learn the
    probabilities of the base model: `teacher`, or the model without its LoRA."""
    pack, logits = forward(model, part, mask_id)
    each = F.cross_entropy(logits, pack.targets, reduction="none") * pack.weights
    if kept := [(sequence, []) for sequence, _ in part if sequence.kept]:
        taught = pack.kept & ~pack.noisy
        with torch.no_grad(), nullcontext() if teacher else model.disable_adapter():
            expected = forward(teacher or model, kept, mask_id)[1].log_softmax(-1)
        apart = F.kl_div(logits[taught].log_softmax(-1), expected, reduction="none", log_target=True)
        each = each.masked_scatter(taught, apart.sum(-1))
    return each[~pack.noisy].sum(), each[pack.noisy].sum()


class Run:
    """The optimizer over fp32 copies of the trained weights, and what to remember between restarts."""

    def __init__(self, model: Any, args: argparse.Namespace, settings: str) -> None:
        self.args, self.path = args, args.out / STATE
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.live = [p for _, p in named]
        self.copies = [p if p.dtype == torch.float32 else p.detach().float() for p in self.live]
        rate = args.lr or (1e-5 if args.full else 5e-4)
        self.rates = [3 * rate if "trainable_tokens" in name else rate for name, _ in named]  # the mask's row
        groups = [{"params": [p]} for p in self.copies]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
        self.state: dict[str, Any] = {"settings": settings, "step": 0, "seconds": 0.0, "base": None}
        if self.path.exists():
            stored = torch.load(self.path, weights_only=True)
            if stored["settings"] != settings:
                sys.exit(f"{self.path}: of other rows or settings; give those, or another --out")
            for kept, weights in zip(self.copies, stored.pop("weights"), strict=True):
                kept.data.copy_(weights)
            self.optimizer.load_state_dict(stored.pop("optimizer"))
            self.state = stored
            self.publish()

    def save(self) -> None:
        state = {**self.state, "weights": self.copies, "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a forward to those of the copies."""
        loss.backward()
        for live, kept in zip(self.live, self.copies, strict=True):
            if live is not kept and live.grad is not None:
                kept.grad = live.grad.float() if kept.grad is None else kept.grad.add_(live.grad)
                live.grad = None

    def update(self, progress: float) -> None:
        """The rate rises for 15 steps and falls along a cosine to 3 % of its peak."""
        fall = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * fall * min(1.0, (self.state["step"] + 1) / 15)
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()
        self.state["step"] += 1

    def publish(self) -> None:
        for live, kept in zip(self.live, self.copies, strict=True):
            live.data.copy_(kept)


def train(run: Run, model: Any, teacher: Any, sequences: list[Sequence], mask_id: int) -> bool:
    """Trains until the schedule ends, or a signal comes; whether it ended."""
    args, state = run.args, run.state
    steps = math.ceil(len(sequences) / args.batch) * args.epochs
    stopping: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stopping.append(1)) for number in signals]

    def progress() -> float:
        spent = state["seconds"] / (args.hours * 3600) if args.hours else 0
        return min(1.0, max(state["step"] / steps, spent))

    model.train()
    saved, stream = time.monotonic(), batches(sequences, args, state["step"])
    text = TextColumn("{task.description} {task.percentage:.0f} %, left")
    with Progress(BarColumn(), text, TimeRemainingColumn(), console=console) as bar:
        shown = bar.add_task("", total=1.0, completed=progress())
        while progress() < 1 and not stopping:
            tick, parts = time.monotonic(), next(stream)
            items = [item for part in parts for item in part]
            scored = sum(len(sequence.tokens) - sequence.start for sequence, _ in items)
            masks = max(1, sum(stop - start for _, spans in items for start, stop in spans))
            clean = noisy = 0.0
            for part in parts:
                of_clean, of_noisy = losses(model, teacher, part, mask_id)
                run.backward(of_clean / scored + of_noisy / masks)
                clean, noisy = clean + of_clean.item() / scored, noisy + of_noisy.item() / masks
            run.update(progress())
            state["seconds"] += (took := time.monotonic() - tick)
            line = f"step {state['step']}: loss {clean:.3f}, of masks {noisy:.3f}, {took:.1f} s a step,"
            bar.update(shown, completed=progress(), description=line)
            if state["step"] % 10 == 0:
                console.print(f"{line} {100 * progress():.1f} %")
            if time.monotonic() - saved > 300:
                run.save()
                saved = time.monotonic()
    run.save()
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler)
    return progress() >= 1


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    try:
        rows, held = read_rows(args)
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads or torch.get_num_threads())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        args.pack = args.pack or (4096 if device == "cuda" else 768)
        args.dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
        args.out.mkdir(parents=True, exist_ok=True)
        base = open_base(args.base, args.adapter)
        encoding = base.tokenizer, base.ends, args.max_length
        used = {token for s in encode_all([*rows, *held], *encoding) for token in s.tokens}
        is_new = base.tokenizer.mask_token is None
        mask_id, chosen = choose_mask(base, args.mask_token, used)
        console.print(chosen, markup=False)
        model = load(base, mask_id, is_new, getattr(torch, args.dtype), device)
        complete(rows, base, model, args.out / "answers.jsonl")
        sequences, tests = encode_all(rows, *encoding), encode_all(held, *encoding)
    except BadRows as error:
        sys.exit(str(error))
    lines = [json.dumps(row.task(), ensure_ascii=False) + "\n" for row in held]
    (args.out / "held-out.jsonl").write_text("".join(lines), encoding="utf-8")
    if device == "cuda":
        model.set_attn_implementation("flex_attention")
    teacher = copy.deepcopy(model).eval() if args.full and args.keep else None
    model = model if args.full else with_lora(model, mask_id, args.rank, args.adapter)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fixed = {name: str(value) for name, value in vars(args).items() if name not in NOT_SETTINGS}
    data = json.dumps([fixed, [(s.tokens, s.start, s.kept) for s in sequences]])
    run = Run(model, args, hashlib.sha256(data.encode()).hexdigest())
    trained = sum(p.numel() for p in run.copies) / 1e6
    console.print(
        f"{len(sequences)} answers, {len(tests)} held out, {trained:.1f}M weights to train, {args.dtype}"
    )
    if run.state["base"] is None:
        with nullcontext() if args.full else model.disable_adapter():
            run.state["base"] = dict(score(model, tests, mask_id, 0))
    if not train(run, model, teacher, sequences, mask_id):
        sys.exit(f"stopped after step {run.state['step']}; the same command continues")
    save(model, base, args.out)
    if tests:
        console.print("measuring the held-out answers")
        console.print(table(run.state["base"], score(model, tests, mask_id, args.block - 1)))
    console.print(f"{run.state['step']} steps in {run.state['seconds']:.0f} s")
    command = f"mars-export onnx {args.out} -o {args.out.name}.bundle --block {args.block}"
    console.print(f"next: {command}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
