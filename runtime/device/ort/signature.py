"""The names, types and sizes that a step graph must have by the manifest."""

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
    heads, entry = model.entry_shape(variant.kv_dtype, variant.kv_layout)
    shape = [None, None, entry] if variant.kv_layout == "cuda" else [None, heads, None, entry]
    forms = dict.fromkeys(model.kv_suffixes, (shape, TYPES[variant.kv_dtype]))
    for suffix, sizes in model.recurrent.shapes(0).items() if model.recurrent else ():
        kept = [*sizes] if suffix.endswith(".state") else [f"outputs_and_{sizes[0]}", *sizes[1:]]
        forms[suffix] = ([None, *kept], TYPES["float32"])
    in_place = variant.kv_layout != "appended"  # past and present are one buffer
    pasts = [f"past_key_values.{s}" for s in model.kv_suffixes]
    presents = [f"present.{s}" for s in model.kv_suffixes]
    graph_inputs = {i.name: i for i in session.get_inputs()}
    graph_outputs = {o.name: o for o in session.get_outputs()}
    others = {"input_ids", "kv_length", "output_index", *(["state_length"] if model.recurrent else [])}
    mismatched = graph_inputs.keys() ^ {*others, *(f"past_key_values.{s}" for s in forms)}
    mismatched |= graph_outputs.keys() ^ {*variant.outputs, *(f"present.{s}" for s in forms)}
    for name, info in [*graph_inputs.items(), *graph_outputs.items()]:
        prefix, _, suffix = name.partition(".")
        if prefix not in ("past_key_values", "present") or suffix not in forms:
            continue
        wanted, kind = forms[suffix]
        found = [n if size else None for n, size in zip(info.shape, wanted, strict=False)]
        if (len(info.shape), found, info.type) != (len(wanted), wanted, kind):
            mismatched.add(name)
    for past_name, present_name in zip(pasts, presents, strict=True):
        past, present = graph_inputs.get(past_name), graph_outputs.get(present_name)
        if past and present and (past.shape[-2] == present.shape[-2]) != in_place:
            mismatched.add(f"{present_name} (KV layout)")
    if drafts := model.mtp_drafts:
        of_outputs = {name: graph_outputs[name].shape for name in variant.outputs if name in graph_outputs}
        mismatched |= {n for n, shape in of_outputs.items() if shape[1:2] != [f"outputs_and_{drafts}_drafts"]}
    wide = [name for name in ("logits", "topk_ids", "topk_logprobs") if name in graph_outputs]
    widths = {name: tuple(graph_outputs[name].shape[2:]) for name in wide}
    expected = {"logits": (model.vocab_size,), "topk_logprobs": widths.get("topk_ids")}
    for name, width in widths.items():
        is_valid = all(isinstance(n, int) and 0 < n <= model.vocab_size for n in width)
        if width != expected.get(name, width) or not is_valid:
            mismatched.add(name)
    if mismatched:
        raise BundleError(
            f"{graph}: the graph and the manifest disagree about {', '.join(sorted(mismatched)[:6])};"
            " export again"
        )
    return widths
