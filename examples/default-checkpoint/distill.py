"""Answers the chat questions with the base model itself (greedy, batched) and writes them as JSONL; resumable
by question."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from functools import partial
from pathlib import Path

import chat
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

EOS = 2
DATA = Path(__file__).parent / "data"


def shorten(text: str, finished: bool) -> str | None:
    """The answer up to its last complete sentence; None where no sentence was finished."""
    text = text.strip()
    if finished:
        return text or None
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s|$)", text)]
    return text[: ends[-1]] if ends else None


@torch.inference_mode()
def answer(model: LlamaForCausalLM, tokenizer: Tokenizer, asked: list[str], limit: int) -> list[str | None]:
    """Greedy answers to a batch of questions; left-padded, so lengths should be alike."""
    rows = [
        tokenizer.encode(
            f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        ).ids
        for q in asked
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[EOS] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=EOS, pad_token_id=EOS
    )
    answers: list[str | None] = []
    for row in out[:, width:].tolist():
        finished = EOS in row
        row = row[: row.index(EOS)] if finished else row
        answers.append(shorten(tokenizer.decode(row), finished))
    return answers


def ready(args: argparse.Namespace) -> None:
    """Makes this process one that can answer: its own model and tokenizer, one thread."""
    global answering
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(args.base, dtype=getattr(torch, args.dtype)).eval()
    answering = partial(answer, model, tokenizer, limit=args.max_new_tokens)


def answered(asked: list[str]) -> list[tuple[str, str | None]]:
    """Questions of one batch, each with its answer."""
    return list(zip(asked, answering(asked), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--train", type=int, default=7200)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--max-new-tokens", type=int, default=56)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one thread each")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the answering model"
    )
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.ranks, ready, (args,)) as pool:
        for held_out, count in ((True, args.held_out), (False, args.train)):
            path = args.out / f"distilled.{'held-out' if held_out else 'train'}.jsonl"
            done = (
                {json.loads(line)["question"] for line in path.read_text().splitlines()}
                if path.exists()
                else set()
            )
            wanted = sorted((q for q in chat.questions(held_out)[:count] if q not in done), key=len)
            batches = [wanted[start : start + args.batch] for start in range(0, len(wanted), args.batch)]
            with path.open("a") as sink:
                for number, rows in enumerate(pool.imap(answered, batches), 1):
                    for question, text in rows:
                        sink.write(json.dumps({"question": question, "answer": text}) + "\n")
                    sink.flush()
                    print(path.name, "batch", number, "of", len(batches), flush=True)


if __name__ == "__main__":
    main()
