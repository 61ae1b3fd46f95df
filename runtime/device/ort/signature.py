"""Checks that a loaded ONNX graph has the inputs and outputs that the manifest promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BundleError


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV tensors of a graph: their name suffixes, (kv_heads, head_dim), and ONNX Runtime's type name.

    `in_place`: past and present are one buffer; otherwise present has only the entries of a step.
    """

    suffixes: Sequence[str]
    shape: tuple[int, int]
    type: str
    in_place: bool


def check_signature(
    session: Any, graph: Path, outputs: Sequence[str], layout: KvLayout, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """The further dimensions of outputs that have several values for each position. Raises BundleError."""
    pasts = [f"past_key_values.{s}" for s in layout.suffixes]
    presents = [f"present.{s}" for s in layout.suffixes]
    graph_inputs = {i.name: i for i in session.get_inputs()}
    graph_outputs = {o.name: o for o in session.get_outputs()}
    odd = graph_inputs.keys() ^ {"input_ids", "kv_length", "output_index", *pasts}
    odd |= graph_outputs.keys() ^ {*outputs, *presents}
    for name, info in [*graph_inputs.items(), *graph_outputs.items()]:
        is_kv = name.startswith(("past_key_values.", "present."))
        if is_kv and ((info.shape[1], info.shape[3]) != layout.shape or info.type != layout.type):
            odd.add(name)
    for past_name, present_name in zip(pasts, presents, strict=True):
        past, present = graph_inputs.get(past_name), graph_outputs.get(present_name)
        if past and present and (past.shape[2] == present.shape[2]) != layout.in_place:
            odd.add(f"{present_name} (KV layout)")
    wide = [name for name in ("logits", "topk_ids", "topk_logprobs") if name in graph_outputs]
    widths = {name: tuple(graph_outputs[name].shape[2:]) for name in wide}
    expected = {"logits": (vocab_size,), "topk_logprobs": widths.get("topk_ids")}
    for name, width in widths.items():
        is_valid = all(isinstance(n, int) and 0 < n <= vocab_size for n in width)
        if width != expected.get(name, width) or not is_valid:
            odd.add(name)
    if odd:
        raise BundleError(
            f"{graph}: the graph and the manifest disagree about {', '.join(sorted(odd)[:6])}; export again"
        )
    return widths
