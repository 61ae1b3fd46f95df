"""How much of the fp32 model each precision and each peer keeps, on a page of prose and on chats.

    python benchmarks/peers.py --setup llama-cpp genai      # once
    python benchmarks/quality.py                            # makes the models that are absent, then measures
    python benchmarks/quality.py --bundles my.bundle        # other bundles of the same checkpoint, too

Every text is fed as it stands, in pieces of 256 tokens, and the predictions of its next tokens are compared
with those of our fp32 bundle: how often the most likely token is the same, the Kullback-Leibler divergence in
nats, and the text's perplexity. Of the chats (`chat.test.jsonl`), the answers count. A piece's first
prediction is left out: nothing precedes it, and no decoding step uses it. The mask token is never predicted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mars_export.calibration.tasks import tasks
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.text.tokenizer import Text
from peers import catalog, machine, rows, running
from peers.machine import say
from peers.process import PeerError, Process
from peers.protocol import Request

ROOT = Path(__file__).resolve().parent
REFERENCE = "ours fp32"
WORDS = ("ours", "llama.cpp", "genai int4")  # programs that give logits
PIECE = 256  # tokens
NEVER = -1e9  # the mask token's logit


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids; the predictions at `first` and later, but not at the last token, are compared."""

    ids: list[int]
    first: int = 1


@dataclass(slots=True)
class Sums:
    """Sums over the predictions of a text."""

    tokens: int = 0
    equal: int = 0
    divergence: float = 0.0
    loss: float = 0.0
    reference_loss: float = 0.0

    def add(self, found: np.ndarray, exact: np.ndarray, following: Sequence[int]) -> None:
        """Natural log-probabilities [tokens, vocab], and the tokens that follow."""
        index = np.arange(len(following)), np.asarray(following)
        self.tokens += len(following)
        self.equal += int((found.argmax(-1) == exact.argmax(-1)).sum())
        self.divergence += float((np.exp(exact) * (exact - found)).sum())
        self.loss -= float(found[index].sum())
        self.reference_loss -= float(exact[index].sum())

    def figures(self) -> dict[str, float]:
        perplexity, exact = np.exp(self.loss / self.tokens), np.exp(self.reference_loss / self.tokens)
        return {
            "tokens": self.tokens,
            "top1_equal": round(self.equal / self.tokens, 4),
            "kl": round(self.divergence / self.tokens, 5),
            "perplexity": round(float(perplexity), 3),
            "perplexity_change": round(float(perplexity / exact - 1), 4),
        }


@dataclass(slots=True)
class Texts:
    """The texts as token ids of the bundle's vocabulary."""

    mask: int
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    @classmethod
    def read(cls, bundle: Path, num_chats: int) -> Texts:
        opened = open_bundle(bundle)
        text, tokens = Text.load(opened), opened.manifest.tokens
        ids = text.encode((ROOT / "pages" / "prose.txt").read_text(encoding="utf-8"))
        pieces = [Piece(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]
        chats = []
        for row in tasks.load(rows.DATA / "chat.test.jsonl")[:num_chats]:
            prompt = text.encode(row.prompt)
            answer = [*text.encode_part(row.answer), tokens.eos[0]]
            chats.append(Piece([*prompt, *answer], len(prompt) - 1))
        return cls(tokens.mask, {"prose": [p for p in pieces if len(p.ids) > 2], "chat": chats})


def log_probabilities(process: Process, piece: Piece, mask: int, scratch: Path) -> np.ndarray:
    """[predictions, vocab] fp32"""
    path = scratch / "logits.npy"
    process.answer(Request(piece.ids, 1, [], mask, {"logits": str(path)}))
    logits = np.load(path)[piece.first : -1].astype(np.float32)
    logits[:, mask] = NEVER
    logits -= logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def measure(processes: dict[str, Process], texts: Texts, absent: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A row of the table for each text and program. A program that fails is named in `absent`."""
    with tempfile.TemporaryDirectory() as scratch:
        for text, pieces in texts.pieces.items():
            sums = {name: Sums() for name in processes}
            for piece in pieces:
                exact = log_probabilities(processes[REFERENCE], piece, texts.mask, Path(scratch))
                for name in list(sums):
                    try:
                        found = log_probabilities(processes[name], piece, texts.mask, Path(scratch))
                    except PeerError as error:
                        absent[name] = str(error)
                        del sums[name]
                        continue
                    sums[name].add(found, exact, piece.ids[piece.first + 1 :])
            yield from ({"text": text, "system": name, **total.figures()} for name, total in sums.items())


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each system the same three figures of each text."""
    texts = list(dict.fromkeys(row["text"] for row in found))
    lines = ["| system | " + " | ".join(f"{text}: top-1 equal, KL, perplexity" for text in texts) + " |"]
    lines.append("|---" * (len(texts) + 1) + "|")
    for name in dict.fromkeys(row["system"] for row in found):
        cells = [
            f"{row['top1_equal']:.1%}, {row['kl']:.4f},"
            f" {row['perplexity']:.2f} ({row['perplexity_change']:+.1%})"
            for row in found
            if row["system"] == name
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venvs", type=Path, default=Path("build/peers/venvs"), help="as for peers.py")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="models and logs")
    parser.add_argument("--only", nargs="+", default=WORDS, metavar="WORD", help="programs with these words")
    parser.add_argument("--bundles", nargs="+", type=Path, default=[], help="other bundles to compare, too")
    parser.add_argument("--chats", type=int, default=60, help="rows of chat.test.jsonl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "quality.json")
    args = parser.parse_args()
    args.venvs, args.work = args.venvs.absolute(), args.work.absolute()
    processes, absent = running.start_all(args, args.only, {"logits": True})
    try:
        if REFERENCE not in processes:
            sys.exit("error: our own fp32 bundle does not run, so there is nothing to compare with")
        for bundle in args.bundles:
            where = {"device": "cpu"}
            program = catalog.Program(f"ours {bundle.stem}", None, "ours", bundle.absolute(), (), where)
            processes[program.name] = running.start(program, args, {})
        texts = Texts.read(args.work / "fp32.bundle", args.chats)
        found = list(measure(processes, texts, absent))
    finally:
        for process in processes.values():
            process.close()
    about = {**machine.about(args.threads), "absent": absent}
    about |= {"versions": {name: process.versions for name, process in processes.items()}}
    places = {"VENVS": str(args.venvs), "WORK": str(args.work), "python": sys.executable}
    machine.save(args.json, {"about": about, "quality": found}, places)
    print(table(found))
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")


if __name__ == "__main__":
    main()
