"""OpenVINO GenAI: a model of optimum-intel's export, with its LLMPipeline, greedy. With the option `lookup`,
prompt lookup proposes tokens from the prompt and the answer so far.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from peers.protocol import Answer, Reply, Request, serve


class FirstToken(openvino_genai.StreamerBase):
    """Notes when the first tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0

    def write(self, _tokens: int | list[int]) -> openvino_genai.StreamingStatus:
        self.at = self.at or perf_counter()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    lookup: dict[str, int] = options.get("lookup", {})
    properties = {"INFERENCE_NUM_THREADS": options["threads"], "PERFORMANCE_HINT": "LATENCY"}
    if lookup:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **properties)

    def answer(request: Request) -> Reply:
        prompt, limit = request.prompt, request.limit
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = limit, False
        config.stop_token_ids, config.eos_token_id = set(request.eos), request.eos[0]
        for name, value in lookup.items():
            setattr(config, name, value)
        ids = np.array([prompt], np.int64)
        begun, first = perf_counter(), FirstToken()
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        new = [int(token) for token in pipeline.generate(inputs, config, first).tokens[0]]
        return Reply(new, perf_counter() - begun, first.at - begun, 1, None if lookup else len(new))

    return answer, f"openvino-genai {openvino_genai.__version__}"


if __name__ == "__main__":
    serve(load)
