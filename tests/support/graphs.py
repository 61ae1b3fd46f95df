"""A step graph asked for every position of a text, and the weights that its codes stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from mars_export import Session
from mars_export.exporter.checkpoint import names
from mars_export.exporter.checkpoint.tensors import Tensors
from mars_export.exporter.codes import Quantization
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


@dataclass(frozen=True, slots=True)
class Decoded:
    """A checkpoint's tensors as the codes of a bundle stand for them, lm_head apart from the embedding."""

    stored: Tensors
    storage: Quantization

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.stored.shapes

    def read(self, name: str) -> np.ndarray:
        weight = self.stored.read(name if name in self.shapes else names.EMBEDDING)
        tables = {names.EMBEDDING: self.storage.embedding, names.HEAD: self.storage.head}
        if name in tables:
            codec = self.storage.table(tables[name])
        else:
            codec = self.storage.codec(name) if names.is_linear(name) else None
        if codec is None:
            return weight
        return codec.encode(weight, np.dtype(np.float32)).decoded().reshape(weight.shape)
