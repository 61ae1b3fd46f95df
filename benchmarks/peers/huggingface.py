"""`generate` of Hugging Face models with KV cache, one token a step: transformers in fp32, or optimum's ONNX
export (`runtime: "onnx"`).
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers

from peers.protocol import Answer, Reply, Request, serve


class FirstToken:
    """A streamer that notes when the first new token came; `generate` sends it the prompt first."""

    def __init__(self) -> None:
        self.count, self.at = 0, 0.0

    def put(self, _: Any) -> None:
        self.count += 1
        if self.count == 2:
            self.at = perf_counter()

    def end(self) -> None:
        pass


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    torch.set_num_threads(options["threads"])
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    if options.get("runtime") == "onnx":
        model, versions = _onnx(options), f"{versions}, {_onnx_versions()}"
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.float32
        ).eval()

    def answer(request: Request) -> Reply:
        prompt, limit = request.prompt, request.limit
        streamer = FirstToken()
        begun = perf_counter()
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            made = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=request.eos,
                pad_token_id=request.eos[0],
                streamer=streamer,
            )
        seconds = perf_counter() - begun
        new = made[0, len(prompt) :].tolist()
        return Reply(new, seconds, streamer.at - begun, 1, len(new))

    return answer, versions


def _onnx(options: dict[str, Any]) -> Any:
    import onnxruntime
    from optimum.onnxruntime import ORTModelForCausalLM

    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = options["threads"]
    return ORTModelForCausalLM.from_pretrained(options["model"], session_options=session, use_cache=True)


def _onnx_versions() -> str:
    from importlib.metadata import version

    return f"optimum-onnx {version('optimum-onnx')}, onnxruntime {version('onnxruntime')}"


if __name__ == "__main__":
    serve(load)
