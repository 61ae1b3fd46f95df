"""A step graph asked for every position of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from mars_export import Session
from mars_export.runtime.decode.backend import StepInput
from support import tiny

TOKENS = [(31 * i) % 250 for i in range(40)] + [tiny.MASK] * 5


KEPT = np.arange(tiny.VOCAB_SIZE) != tiny.MASK


def forward(session: Session, tokens: list[int], cuts: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """token_ids, confidence, margin, entropy, logits for every position, fed in pieces that end at `cuts`."""
    backend, parts = session.backend, []
    cache = backend.new_cache(1)
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        cache.reserve(stop, [start])
        index = np.arange(stop - start)[None]
        parts.append(
            backend.step(cache, 0, StepInput(np.array([tokens[start:stop]]), np.array([start]), index), True)
        )
    names = ("token_ids", "confidence", "margin", "entropy", "logits")
    return tuple(np.concatenate([getattr(part, name)[0] for part in parts]) for name in names)


def raw(path: Path, plans: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, plans), strict=True))


def shape_of(info: onnx.ValueInfoProto) -> tuple[int, list[int | str]]:
    kind = info.type.tensor_type
    return kind.elem_type, [d.dim_param or d.dim_value for d in kind.shape.dim]
