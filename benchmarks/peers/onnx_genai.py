"""onnx-genai: onnxruntime-genai's model by another engine, one token a step. It takes text."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from tokenizers import Tokenizer

from peers.protocol import Answer, Reply, Request, serve


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    # It has no setting for threads: ONNX Runtime takes the cores that this process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options["threads"]])
    import onnx_genai

    engine = onnx_genai.Engine.from_dir(options["model"])
    tokenizer = Tokenizer.from_file(str(Path(options["model"]) / "tokenizer.json"))

    def answer(request: Request) -> Reply:
        text = tokenizer.decode(request.prompt, skip_special_tokens=False)
        if engine.tokenize(text) != request.prompt:
            raise ValueError("the prompt's text has other tokens in onnx-genai")
        new: list[int] = []
        times: list[float] = []

        def on_token(_text: str, token: int | None, _reason: str | None) -> None:
            if token is not None:
                new.append(int(token))
                times.append(perf_counter() - begun)

        begun = perf_counter()
        engine.generate_stream(text, on_token, max_tokens=request.limit, temperature=0.0)
        return Reply(new, perf_counter() - begun, times[0] if times else 0.0, 1, len(new))

    return answer, f"onnx-genai {version('onnx-genai')}, onnxruntime {version('onnxruntime')}"


if __name__ == "__main__":
    serve(load)
