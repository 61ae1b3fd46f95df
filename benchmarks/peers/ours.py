"""mars-export itself: one bundle, exact mode or any tau, any cache loop and batch.

Settings: tau (absent: exact mode), window, commit, cache_block.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import onnxruntime

from mars_export import GenerationConfig, Session
from mars_export.runtime.session.session import Commit
from peers.protocol import Answer, Reply, Request, serve


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    session = Session.open(
        options["model"], threads=options["threads"], cache_bytes=options.get("cache_bytes", 0)
    )

    def answer(request: Request) -> Reply:
        settings = request.settings
        commit = Commit(settings.get("commit", "cursor"), settings.get("cache_block", 32))
        config = GenerationConfig(
            tau=settings.get("tau"), window=settings.get("window", "auto"), eos_ids=tuple(request.eos)
        )
        configs = [config.with_values(max_new_tokens=limit) for limit in request.limits]
        begun = perf_counter()
        made = session.generate_batch(request.prompts, configs, commit=commit)
        seconds = perf_counter() - begun
        stats = [done.stats for done in made]
        first = sum(s.tokens - s.tokens_after_first for s in stats)
        first_seconds = sum(s.time_to_first_token for s in stats) / len(stats)
        forwards = sum(s.forwards for s in stats)
        return Reply([list(done.token_ids) for done in made], seconds, first_seconds, first, forwards)

    return answer, f"onnxruntime {onnxruntime.__version__}"


if __name__ == "__main__":
    serve(load)
