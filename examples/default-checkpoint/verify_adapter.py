"""Compares the shipped adapter, loaded by PEFT over the base, with the training forward on one held-out
row."""

from __future__ import annotations

import argparse
from pathlib import Path

import dataset
import torch
from model import MASK_ID, WINDOW, TwoStream, lay_out
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    tokens, prompt = dataset.encode(tokenizer, dataset.held_out_rows("assistant")["calibration"][0])
    start, stop = prompt + 4, prompt + 4 + WINDOW
    ours = TwoStream(args.base)
    ours.load_state_dict(torch.load(args.checkpoint, weights_only=True)["model"])
    logits = ours([lay_out(tokens, prompt, [(start, stop)])])
    base = LlamaForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, args.adapter).eval()
    clean = theirs(torch.tensor([tokens[:-1]])).logits[0, prompt - 1 :]
    noisy = theirs(torch.tensor([tokens[:start] + [MASK_ID] * WINDOW])).logits[0, start:]
    expected = torch.cat((clean, noisy))
    kept = torch.arange(logits.shape[-1]) != MASK_ID
    difference = (logits - expected)[:, kept]
    agree = (logits[:, kept].argmax(-1) == expected[:, kept].argmax(-1)).float().mean()
    print(
        f"max logit difference {difference.abs().max():.4f} (fp16 adapter),"
        f" argmax agreement {agree:.4f} of {len(logits)} rows"
    )


if __name__ == "__main__":
    main()
