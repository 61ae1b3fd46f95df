"""llama.cpp through llama-cpp-python: a GGUF file, greedy, one token a step. Each prompt is read anew."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from peers.protocol import Answer, Reply, Request, serve


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    threads = options["threads"]
    model = llama_cpp.Llama(
        options["model"],
        n_ctx=options["context"],
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=options.get("logits", False),
        verbose=False,
    )

    def answer(request: Request) -> Reply:
        prompt, limit = request.prompt, request.limit
        begun = perf_counter()
        model.reset()
        if path := request.settings.get("logits"):
            model.eval(prompt)
            np.save(path, model.scores[: len(prompt)])
            return Reply([], 0, 0, 0)
        new: list[int] = []
        first_seconds = 0.0
        for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            new.append(int(token))
            if len(new) == 1:
                first_seconds = perf_counter() - begun
            if len(new) == limit or token in request.eos:
                break
        return Reply(new, perf_counter() - begun, first_seconds, 1, len(new))

    return answer, f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    serve(load)
