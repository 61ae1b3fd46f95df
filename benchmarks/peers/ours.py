"""mars-export itself: one bundle, exact mode or any tau (setting `tau`; absent: exact mode)."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime

from mars_export import GenerationConfig, Session
from mars_export.runtime.decode.backend import StepInput
from peers.protocol import Answer, Reply, Request, serve
from steps import Times, step_of


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    threads = options["threads"] if options["device"] == "cpu" else None
    session = Session.open(options["model"], options["device"], threads=threads, cache_bytes=0)

    def logits(prompt: list[int]) -> np.ndarray:
        cache = session.backend.new_cache(1)
        cache.reserve(len(prompt))
        index = np.arange(len(prompt))[None]
        found = session.backend.step(
            cache, 0, StepInput(np.array([prompt]), np.array([0]), index), True
        ).logits
        if found is None:
            raise ValueError("this bundle has no logits: export it without --no-logits")
        return found[0]

    def answer(request: Request) -> Reply:
        if path := request.settings.get("logits"):
            np.save(path, logits(request.prompt))
            return Reply([], 0, 0, 0)
        if slots := request.settings.get("slots"):
            work, times = step_of(session.backend, slots), Times()
            work()
            for _ in range(5):
                times.measure(work)
            return Reply([], median(times.wall) / 1000, 0, 0)
        config = GenerationConfig(
            tau=request.settings.get("tau"), max_new_tokens=request.limit, eos_ids=tuple(request.eos)
        )
        begun = perf_counter()
        made = session.generate(request.prompt, config)
        seconds, stats = perf_counter() - begun, made.stats
        first = stats.tokens - stats.tokens_after_first
        return Reply(list(made.token_ids), seconds, stats.time_to_first_token, first, stats.forwards)

    return answer, f"onnxruntime {onnxruntime.__version__}"


if __name__ == "__main__":
    serve(load)
