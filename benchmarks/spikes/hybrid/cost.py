"""What a step of linear layers costs: the operator alone, and a whole layer of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from . import graph, model
from .backend import HybridBackend

HEADS, SIZE = 16, 128
SLOTS = (1, 2, 4, 8, 15, 256)
# One linear and one full layer as wide as Qwen3.5's smallest, with a small vocabulary.
REAL = {
    "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": SIZE, "linear_value_head_dim": SIZE,
    "linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, "max_position_embeddings": 4096,
}  # fmt: skip


def milliseconds(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Processor time of the median call: others may share the machine."""
    call()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds and len(times) < 300):
        begun = process_time()
        call()
        times.append(process_time() - begun)
    return median(times) * 1000


def operator(slots: int, domain: str) -> float:
    """One LinearAttention node, state included."""
    heads = (1, slots, HEADS)
    sizes = dict.fromkeys(("q", "k", "v"), (1, slots, HEADS * SIZE))
    sizes |= {"past": (1, HEADS, SIZE, SIZE), "decay": heads, "beta": heads}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()]
    shapes = {"out": sizes["v"], "present": sizes["past"]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in shapes.items()]
    settings = {"domain": domain, "q_num_heads": HEADS, "kv_num_heads": HEADS}
    node = helper.make_node(graph.LINEAR, list(sizes), list(shapes), **settings)
    opsets = [helper.make_opsetid("", 27), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(
        helper.make_graph([node], "operator", inputs, outputs), opset_imports=opsets, ir_version=13
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    feeds = {n: draw.standard_normal(size, np.float32) * np.float32(0.05) for n, size in sizes.items()}
    feeds["decay"] = -np.abs(feeds["decay"])
    return milliseconds(lambda: session.run(None, feeds))


def layers(kinds: str) -> Mapping[tuple[int, int], float]:
    """A step of one row after 512 tokens, by slots and slots of the catch-up; memory stays in place."""
    made = model.look_alike(kinds, 0, REAL)
    backend = HybridBackend(model.graph_of(made), model.shape_of(made.config), 1024, threads=1)
    cache = backend.new_cache(1)
    cache.reserve(1024)
    binding = backend.session.io_binding()
    for name, array in cache.arrays.items():
        memory = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(f"past.{name}", memory)
        binding.bind_ortvalue_output(f"present.{name}", memory)
    found = {}
    for slots in SLOTS:
        for catch_up in (1, slots):
            step: dict[str, Any] = {"input_ids": np.ones((1, slots), np.int64)}
            step |= {"kv_length": np.array([512]), "state_length": np.array([512 - catch_up])}
            step["catch_up"] = np.array([catch_up])
            for name, value in step.items():
                binding.bind_cpu_input(name, value)
            binding.bind_output("token_ids")
            found[slots, catch_up] = milliseconds(lambda: backend.session.run_with_iobinding(binding))
    return found


def table() -> str:
    both, full = layers("lf"), layers("ff")
    lines = ["| slots | operator | ai.onnx's | full layer | linear layer, one behind | as many behind |"]
    lines.append("|---|---|---|---|---|---|")
    for slots in SLOTS:
        half = min(full[slots, 1], full[slots, slots]) / 2
        linear = [both[slots, behind] - half for behind in (1, slots)]
        cells = (operator(slots, "com.microsoft"), operator(slots, ""), half, *linear)
        lines.append(f"| {slots} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)
