"""Writes trace.json and the bundle trace/: a tiny model as tensors, two prefills and three steps, for whoever
writes a runtime of their own.

`PYTHONPATH=tests python tests/conformance/make_trace.py`, then read the diff. The bundle is written once and
kept (delete the folder to make another). What is fed comes from a session (two rows, tau 0.3, all masks);
what the graph answers, from ONNX Runtime alone: outputs of each step, and the KV entries that it wrote.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from support import tiny

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.decode.speculation.cost import Cost

HERE = Path(__file__).parent
BUNDLE, FILE = HERE / "trace", HERE / "trace.json"
PROMPTS = [[5, 17, 99, 4, 61], [77, 30, 8]]
STEPS, CAPACITY, TAU, NEW = 5, 32, 0.3, 16
MODEL = tiny.Tiny(
    "trace",
    "llama",
    {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    },
    tied=True,
    seed=5,
)
FED = ("input_ids", "kv_length", "output_index")
ANSWERED = ("token_ids", "confidence")


def write_bundle() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = open_checkpoint(str(tiny.write(MODEL, Path(scratch) / "model")))
        export_onnx(checkpoint, BUNDLE, ExportOptions(block=4))


def recorded() -> tuple[list[dict[str, Any]], list[list[int]]]:
    """What a session feeds in its first steps, and the tokens that it makes of the answers."""
    session = Session.open(BUNDLE, threads=1, cache_bytes=0)
    session.cost = Cost(((1, 1.0),))
    steps: list[dict[str, Any]] = []
    step = session.backend.step

    def watched(cache: Any, first: int, inputs: StepInput, want_logits: bool) -> Any:
        steps.append({"rows_from": first} | {n: array.tolist() for n, array in inputs._asdict().items()})
        return step(cache, first, inputs, want_logits)

    session.backend.step = watched  # type: ignore[method-assign]
    config = GenerationConfig(tau=TAU, max_new_tokens=NEW, eos_ids=(), masks="full")
    answers = session.generate_batch(PROMPTS, config)
    return steps[:STEPS], [list(answer.token_ids) for answer in answers]


def replay(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same feeds through ONNX Runtime: each step with what it answers and the KV entries it writes."""
    model = onnxruntime.InferenceSession(str(BUNDLE / "model.onnx"), providers=["CPUExecutionProvider"])
    caches = {
        info.name: np.zeros((len(PROMPTS), info.shape[1], CAPACITY, info.shape[3]), np.float32)
        for info in model.get_inputs()
        if info.name.startswith("past_key_values.")
    }
    names = [info.name for info in model.get_outputs()]
    answered = []
    for step in steps:
        fed = {name: np.array(step[name], np.int64) for name in FED}
        rows = slice(step["rows_from"], step["rows_from"] + len(fed["input_ids"]))
        past = {name: np.ascontiguousarray(cache[rows]) for name, cache in caches.items()}
        results = dict(zip(names, model.run(None, fed | past), strict=True))
        written = {}
        for name, cache in caches.items():
            kind = name.removeprefix("past_key_values.")
            cache[rows] = results[f"present.{kind}"]
            written[kind] = [
                cache[rows][row, :, start : start + fed["input_ids"].shape[1]].tolist()
                for row, start in enumerate(fed["kv_length"])
            ]
        answered.append(step | {name: results[name].tolist() for name in ANSWERED} | {"written": written})
    return answered


def trace() -> dict[str, Any]:
    steps, answers = recorded()
    return {
        "bundle": BUNDLE.name,
        "prompts": PROMPTS,
        "settings": {"tau": TAU, "metric": "probability", "masks": "full", "max_new_tokens": NEW},
        "capacity": CAPACITY,
        "tolerance": 1e-5,
        "steps": replay(steps),
        "answers": answers,
    }


def rounded(value: Any) -> Any:
    """Floats to seven digits, and nothing else changed."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def lines(value: dict[str, Any]) -> str:
    """One line for each field of a step: a diff that can be read."""
    steps = [
        "    {\n"
        + ",\n".join(f"      {json.dumps(name)}: {json.dumps(inner)}" for name, inner in step.items())
        + "\n    }"
        for step in value["steps"]
    ]
    rest = {name: json.dumps(inner) for name, inner in value.items()}
    rest["steps"] = "[\n" + ",\n".join(steps) + "\n  ]"
    return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in rest.items()) + "\n}\n"


if __name__ == "__main__":
    if not BUNDLE.exists():
        write_bundle()
    FILE.write_text(lines(rounded(trace())), encoding="utf-8")
