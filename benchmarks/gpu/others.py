"""Other systems on the same card: peers.py's, llama.cpp, onnxruntime-genai, PyTorch and TensorRT-RTX."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from gpu.models import ANSWER, PROMPT, ROUNDS, WORK, MissingError, Row, bundle, cli, ran, timed


def compared(device: str) -> Iterator[Row]:
    """benchmarks/peers.py: all systems on the same rows, one row at a time."""
    for precision in ("fp32",) if device == "cpu" else ("fp32", "fp16", "int4"):
        bundle("base", precision)
    command = [sys.executable, "benchmarks/peers.py", "--device", device, "--work", WORK / "peers"]
    server = WORK / "llama" / "bin" / "llama-server"
    command += ["--llama-server", server] if server.exists() else []
    few = ["--rows", "1", "--arithmetic-rows", "1", "--rounds", "1", "--only", "fp32"]
    command += few if device == "cpu" else ["--threads", 8]
    text = ran([*command, "--json", WORK / "peers.json"], "peers")
    for line in text.splitlines():
        if line.startswith("absent"):
            yield {"absent": line[8:]}
    for found in json.loads((WORK / "peers.json").read_text())["summaries"]:
        keys = ("task", "label", "tokens_per_second", "ttft_ms", "tokens_per_forward", "equal")
        yield {key: round(v, 2) if isinstance(v := found[key], float) else v for key in keys}


def batched() -> Iterator[Row]:
    """llama-batched-bench: its speed at 1 and 8 rows."""
    for kind in ("f16", "q4_0"):
        model = next((WORK / "peers").glob(f"gguf-served-*/{kind}.gguf"), None)
        if model is None or not (WORK / "llama/bin/llama-batched-bench").exists():
            raise MissingError("llama.cpp or its models are not built")
        command = [WORK / "llama/bin/llama-batched-bench", "-m", model, "-ngl", 99, "-c", 8192, "-fa", "on"]
        text = ran(
            [*command, "-npp", PROMPT, "-ntg", ANSWER, "-npl", "1,8", "--output-format", "jsonl"], "bench"
        )
        for line in filter(lambda line: line.startswith("{"), text.splitlines()):
            found = json.loads(line)
            yield {"system": f"llama.cpp {kind}", "batch": found["pl"], "tokens/s": round(found["speed_tg"])}


def genai(model: Path) -> Iterator[Row]:
    """onnxruntime-genai at 1 and 8 rows of random tokens, the prompt left out."""
    import numpy as np

    if not model.exists() or find_spec("onnxruntime_genai") is None:
        raise MissingError(f"onnxruntime-genai or {model.name} is not here")
    import onnxruntime_genai as og

    loaded = og.Model(str(model))
    for rows in (1, 8):
        rates = []
        for _ in range(1 + ROUNDS):
            params = og.GeneratorParams(loaded)
            params.set_search_options(max_length=PROMPT + ANSWER, min_length=PROMPT + ANSWER, batch_size=rows)
            generator = og.Generator(loaded, params)
            generator.append_tokens(
                np.random.default_rng(1).integers(5, 250, (rows, PROMPT)).astype(np.int32)
            )
            generator.generate_next_token()
            begun, count = time.perf_counter(), 0
            while not generator.is_done():
                generator.generate_next_token()
                count += 1
            rates.append(rows * count / (time.perf_counter() - begun))
        yield {"system": model.name, "batch": rows, "tokens/s": round(median(rates[1:]))}


def torch_steps(shape: str, device: str) -> Iterator[Row]:
    """transformers' model with a static cache, random weights: one step captured as a CUDA graph, which is
    PyTorch's floor, and `generate` with its compiled decode.
    """
    import torch
    import transformers

    from random_checkpoint import SHAPES, config_of

    config = transformers.AutoConfig.for_model(**config_of(SHAPES[shape]))
    dtype = torch.float16 if device == "cuda" else torch.float32
    with torch.device(device), torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for rows, slots in ((1, 1), (1, 8), (1, 16), (8, 1), (8, 8)):
            cache = transformers.StaticCache(config=config, max_cache_len=1024)
            model(torch.full((rows, PROMPT), 5), past_key_values=cache)
            ids, at = torch.full((rows, slots), 5), torch.arange(PROMPT, PROMPT + slots)

            def step(ids: Any = ids, at: Any = at, cache: Any = cache) -> None:
                model(ids, position_ids=at[None], past_key_values=cache, cache_position=at)

            row = {"system": f"torch {shape}", "rows": rows, "slots": slots}
            if device == "cuda":
                torch.cuda.synchronize()
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    step()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                yield {
                    **row,
                    "captured, ms": timed(lambda g=graph: (g.replay(), torch.cuda.synchronize()), 30),
                }
            else:
                yield {**row, "eager, ms": timed(step, 3)}
        for rows in (1, 8):
            ids, settings = torch.full((rows, PROMPT), 5), {"cache_implementation": "static"}
            more = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, **settings}
            work = lambda ids=ids, more=more: model.generate(ids, attention_mask=torch.ones_like(ids), **more)  # noqa: E731
            rate = round(1000 * rows * ANSWER / timed(work, ROUNDS))
            yield {"system": f"transformers {shape}, generate, static cache", "batch": rows, "tokens/s": rate}


def engine(target: str) -> Iterator[Row]:
    if find_spec("tensorrt_rtx") is None:
        raise MissingError("tensorrt_rtx is not installed")
    from random_checkpoint import SHAPES, write_checkpoint

    path, source = WORK / f"rtx-{target}.bundle", WORK / "tiny.checkpoint"
    if not source.exists():
        write_checkpoint(source, SHAPES["tiny"])
    cli("trt", source, "-o", path, "--target", target, "--force", log=f"rtx-{target}")
    text = cli("doctor", path, "--device", "cuda", log=f"rtx-{target}-doctor")
    yield from ({"target": target, "doctor": line} for line in text.splitlines() if "variant" in line)
