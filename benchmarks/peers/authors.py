"""The MARS authors' samplers out of a checkout (`path`), on the stock model in transformers fp32.

Settings: tau, sampler, block.
"""

from __future__ import annotations

import sys
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from peers.protocol import Answer, Reply, Request, serve


class Timed:
    """A model whose forwards are counted and whose first one is timed."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        self.forwards, self.first = 0, 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        made = self.model(*args, **named)
        self.forwards += 1
        if self.forwards == 1:
            self.first = perf_counter()
        return made


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    torch.set_num_threads(options["threads"])
    sys.path.insert(0, options["path"])
    from mars import samplers

    stock = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()

    def answer(request: Request) -> Reply:
        prompt, limit, settings = request.prompt, request.limit, request.settings
        tau = settings["tau"]
        model = Timed(stock)
        # Their samplers take every token equal to the padding id for padding, so it must be one that does not
        # occur.
        padding = next(
            i
            for i in reversed(range(stock.config.vocab_size))
            if i not in (request.mask, *request.eos, *prompt)
        )
        tokenizer = SimpleNamespace(
            mask_token_id=request.mask,
            eos_token_id=request.eos[0],
            bos_token_id=prompt[0],
            pad_token_id=padding,
        )
        sampler = getattr(samplers, settings["sampler"])(model, tokenizer)
        config = samplers.MARSSamplerConfig(
            max_new_tokens=limit,
            block_size=settings["block"],
            confidence_threshold=tau if tau < 1 else None,
            right_shift_logits=True,
        )
        begun = perf_counter()
        made = sampler.sample([list(prompt)], config)
        seconds = perf_counter() - begun
        new = _until_end(made[0, len(prompt) :].tolist(), padding, request.eos)
        return Reply(new, seconds, model.first - begun, 1, model.forwards)

    return answer, f"transformers {transformers.__version__}, torch {torch.__version__}"


def _until_end(tokens: list[int], padding: int, eos: list[int]) -> list[int]:
    """Tokens up to an end token: these samplers fill up with padding, and keep what came after an end in the
    same step.
    """
    kept: list[int] = []
    for token in tokens:
        if token == padding:
            break
        kept.append(token)
        if token in eos:
            break
    return kept


if __name__ == "__main__":
    serve(load)
