"""onnxruntime-genai: a model of its own builder, with its Generator, one token a step. With the setting
`speculative` its n-gram speculation proposes tokens from the text so far.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime_genai as og

from peers.protocol import Answer, Reply, Request, serve


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    config = og.Config(options["model"])
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options["threads"]}}}})
    )
    model = og.Model(config)

    def answer(request: Request) -> Reply:
        prompt, limit = request.prompt, request.limit
        speculative = request.settings.get("speculative")
        begun = perf_counter()
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + limit, do_sample=False)
        if speculative:
            params.set_speculative_options(**speculative)
        generator = og.Generator(model, params)
        generator.append_tokens(prompt)
        if path := request.settings.get("logits"):
            np.save(path, generator.get_output("logits")[0].astype(np.float32))
            return Reply([], 0, 0, 0)
        new: list[int] = []
        first_seconds = 0.0
        while not generator.is_done():
            generator.generate_next_token()
            new.append(int(generator.get_next_tokens()[0]))
            if len(new) == 1:
                first_seconds = perf_counter() - begun
            if new[-1] in request.eos:
                break
        return Reply(new, perf_counter() - begun, first_seconds, 1, None if speculative else len(new))

    return answer, f"onnxruntime-genai {og.__version__}"


if __name__ == "__main__":
    serve(load)
