"""Writes the outputs of a step from its logits, in fp32: token ids, confidences, metrics, most likely tokens.

Shapes in comments: b rows, o outputs.
"""

from __future__ import annotations

import numpy as np

from .nodes import Nodes

LAST = "last_axis"


def write(nodes: Nodes, logits: str, metrics: bool, top_k: int, *, in_one_pass: bool) -> None:
    """Write the outputs for logits [b, o, vocab]. `in_one_pass`: with operators that are fast on a CPU."""
    last = nodes.constant(LAST, [-1])
    top = _best(nodes, logits, in_one_pass)
    shifted = nodes.add("Sub", logits, top, name="shifted")
    weights = nodes.add("Exp", shifted, name="weights")
    total = nodes.add("ReduceSum", weights, last, name="partition", keepdims=0)
    nodes.add("Reciprocal", total, name="confidence_node", output="confidence")
    if metrics:
        _metrics(nodes, logits, shifted, weights, total)
    if top_k:
        _top_k(nodes, top_k, shifted, total)


def _best(nodes: Nodes, logits: str, in_one_pass: bool) -> str:
    """Write `token_ids`, the first of the largest logits, and return that logit [b, o, 1].

    On a CPU, TopK computes both in one pass, and also chooses the first of equal logits.
    """
    if in_one_pass:
        top, place = nodes.add_many(
            "TopK", logits, ("one_best", [1]), name="best", outputs=["top_logit", "top_id"], axis=-1
        )
        nodes.add("Squeeze", place, LAST, name="argmax", output="token_ids")
        return top
    nodes.add("ArgMax", logits, name="argmax", output="token_ids", axis=-1, keepdims=0)
    return nodes.add("ReduceMax", logits, LAST, name="top_logit", keepdims=1)


def _metrics(nodes: Nodes, logits: str, shifted: str, weights: str, total: str) -> None:
    best, _ = nodes.add_many(
        "TopK", logits, ("two", [2]), name="top2", outputs=["top2_logits", "top2_ids"], axis=-1
    )
    first, second = nodes.split(best, ("ones", [1, 1]), ("top1", "top2"), "top2_split")
    ratio = nodes.add("Exp", nodes.add("Sub", second, first, name="top_gap"), name="top_ratio_1")
    ratio = nodes.add("Squeeze", ratio, LAST, name="top_ratio")
    share = nodes.add("Sub", ("one_f32", 1.0, np.float32), ratio, name="top_share")
    nodes.add("Mul", "confidence", share, name="margin_node", output="margin")
    expected = nodes.add(
        "ReduceSum",
        nodes.add("Mul", weights, shifted, name="weighted"),
        LAST,
        name="weighted_sum",
        keepdims=0,
    )
    mean = nodes.add("Div", expected, total, name="mean_shifted")
    nodes.add(
        "Sub", nodes.add("Log", total, name="log_partition"), mean, name="entropy_node", output="entropy"
    )


def _top_k(nodes: Nodes, top_k: int, shifted: str, total: str) -> None:
    """The most likely tokens of each output, best first, and their natural log-probabilities."""
    best, _ = nodes.add_many(
        "TopK", shifted, ("num_topk", [top_k]), name="topk", outputs=["topk_shifted", "topk_ids"], axis=-1
    )
    wide = nodes.add("Unsqueeze", total, LAST, name="partition_column")
    nodes.add(
        "Sub",
        best,
        nodes.add("Log", wide, name="log_partition_column"),
        name="topk_logprobs_node",
        output="topk_logprobs",
    )
