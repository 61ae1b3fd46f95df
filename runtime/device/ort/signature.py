"""Whether a loaded graph has the inputs and outputs that the manifest promises. Names no library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BundleError


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`suffixes` name the KV tensors, `shape` is (kv_heads, head_dim), `type` ONNX Runtime's word for theirs.

    In place `past` and `present` are one buffer; else `present` has the entries of the slots only.
    """

    suffixes: Sequence[str]
    shape: tuple[int, int]
    type: str
    in_place: bool


def check_signature(
    session: Any, graph: Path, outputs: Sequence[str], layout: KvLayout, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Of the outputs that are wider than a number for each position, how wide. Raises BundleError."""
    inputs_due = {
        "input_ids",
        "kv_length",
        "output_index",
        *(f"past_key_values.{s}" for s in layout.suffixes),
    }
    outputs_due = {*outputs, *(f"present.{s}" for s in layout.suffixes)}
    inputs_here = {i.name: i for i in session.get_inputs()}
    here = {o.name: o for o in session.get_outputs()}
    odd = (inputs_here.keys() ^ inputs_due) | (here.keys() ^ outputs_due)
    for name, info in [*inputs_here.items(), *here.items()]:
        is_cache = name.startswith(("past_key_values.", "present."))
        if is_cache and ((info.shape[1], info.shape[3]) != layout.shape or info.type != layout.type):
            odd.add(name)
    for suffix in layout.suffixes:
        past, present = inputs_here.get(f"past_key_values.{suffix}"), here.get(f"present.{suffix}")
        if past and present and (past.shape[2] == present.shape[2]) != layout.in_place:
            odd.add(f"present.{suffix} (KV layout)")
    wide = [name for name in ("logits", "topk_ids", "topk_logprobs") if name in here]
    widths = {name: tuple(here[name].shape[2:]) for name in wide}
    right = {"logits": (vocab_size,), "topk_logprobs": widths.get("topk_ids")}
    odd |= {name for name in wide if name in right and widths[name] != right[name]}
    odd |= {
        name for name in wide if not all(isinstance(n, int) and 0 < n <= vocab_size for n in widths[name])
    }
    if odd:
        raise BundleError(
            f"{graph}: the graph and the manifest disagree about {', '.join(sorted(odd)[:6])}; export again"
        )
    return widths
