"""Answers the chat rows with the base model itself, under its own chat template (greedy, batched), and writes
them as JSONL; resumable by row."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chat
import smalltalk
import torch
from dataset import DATA, EOS, Messages, prompt
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

LIMIT = 64  # tokens of an answer; one that is longer is kept as it is then, without an end


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM, tokenizer: Tokenizer, talks: Sequence[Messages]
) -> list[tuple[str, bool]]:
    """Greedy answers to a batch of talks, and whether each came to its end; left-padded, so lengths should be
    alike."""
    rows = [tokenizer.encode(prompt(talk), add_special_tokens=False).ids for talk in talks]
    width = max(map(len, rows))
    ids = torch.tensor([[EOS] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=LIMIT, do_sample=False, eos_token_id=EOS, pad_token_id=EOS
    )
    answers: list[tuple[str, bool]] = []
    for row in out[:, width:].tolist():
        finished = EOS in row
        answers.append((tokenizer.decode(row[: row.index(EOS)] if finished else row), finished))
    return answers


def ready(base: Path) -> None:
    """Makes this process one that can answer: its own model and tokenizer, one thread."""
    global answering
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    answering = partial(answer, model, tokenizer)


def answered(talks: list[Messages]) -> list[dict[str, object]]:
    """Rows of one batch."""
    return [
        {"messages": talk, "answer": text, "finished": finished}
        for talk, (text, finished) in zip(talks, answering(talks), strict=True)
    ]


def stored(path: Path) -> dict[str, dict]:
    """The rows of a file by their messages."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.dumps(row["messages"]): row for row in map(json.loads, lines)}


def fill(path: Path, talks: list[Messages], pool: multiprocessing.pool.Pool, batch: int) -> None:
    """Answers the talks that the file does not have yet."""
    done = stored(path)
    wanted = sorted((talk for talk in talks if json.dumps(talk) not in done), key=lambda t: len(prompt(t)))
    batches = [wanted[start : start + batch] for start in range(0, len(wanted), batch)]
    with path.open("a") as sink:
        for number, rows in enumerate(pool.imap(answered, batches), 1):
            sink.writelines(json.dumps(row) + "\n" for row in rows)
            sink.flush()
            print(path.name, "batch", number, "of", len(batches), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one thread each")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.ranks, ready, (args.base,)) as pool:
        greetings = [[["user", said]] for said, _ in smalltalk.held_out()]
        fill(DATA / "greetings.base.jsonl", greetings, pool, args.batch)
        for held_out in (True, False):
            path = DATA / f"distilled.{'held-out' if held_out else 'train'}.jsonl"
            first = [[["user", question]] for question in chat.questions(held_out)]
            fill(path, first, pool, args.batch)
            if held_out:
                rows = [stored(path)[json.dumps(talk)] for talk in first]
                short = [(row["messages"][0][1], row["answer"]) for row in rows if row["finished"]]
                second = [
                    [["user", question], ["assistant", text], ["user", said]]
                    for question, text, said in chat.follow_ups(short)
                ]
                fill(path, second, pool, args.batch)


if __name__ == "__main__":
    main()
