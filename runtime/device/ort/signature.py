"""Checks that a loaded ONNX graph has the inputs and outputs that the manifest promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...bundle.manifest import ModelInfo, Variant
from ...errors import BundleError

TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}


def check_signature(
    session: Any, graph: Path, variant: Variant, model: ModelInfo
) -> dict[str, tuple[int, ...]]:
    """The further dimensions of outputs that have several values for each position. Raises BundleError."""
    entry = model.entry_width(variant.kv_dtype)
    kv_shape, kv_type = (model.num_kv_heads, entry), TYPES[variant.kv_dtype]
    in_place = variant.kv_layout == "in-place"  # past and present are one buffer
    pasts = [f"past_key_values.{s}" for s in model.kv_suffixes]
    presents = [f"present.{s}" for s in model.kv_suffixes]
    graph_inputs = {i.name: i for i in session.get_inputs()}
    graph_outputs = {o.name: o for o in session.get_outputs()}
    odd = graph_inputs.keys() ^ {"input_ids", "kv_length", "output_index", *pasts}
    odd |= graph_outputs.keys() ^ {*variant.outputs, *presents}
    for name, info in [*graph_inputs.items(), *graph_outputs.items()]:
        is_kv = name.startswith(("past_key_values.", "present."))
        if is_kv and ((info.shape[1], info.shape[3]) != kv_shape or info.type != kv_type):
            odd.add(name)
    for past_name, present_name in zip(pasts, presents, strict=True):
        past, present = graph_inputs.get(past_name), graph_outputs.get(present_name)
        if past and present and (past.shape[2] == present.shape[2]) != in_place:
            odd.add(f"{present_name} (KV layout)")
    wide = [name for name in ("logits", "topk_ids", "topk_logprobs") if name in graph_outputs]
    widths = {name: tuple(graph_outputs[name].shape[2:]) for name in wide}
    expected = {"logits": (model.vocab_size,), "topk_logprobs": widths.get("topk_ids")}
    for name, width in widths.items():
        is_valid = all(isinstance(n, int) and 0 < n <= model.vocab_size for n in width)
        if width != expected.get(name, width) or not is_valid:
            odd.add(name)
    if odd:
        raise BundleError(
            f"{graph}: the graph and the manifest disagree about {', '.join(sorted(odd)[:6])}; export again"
        )
    return widths
