"""The tensors of a step of ONNX Runtime: checked by the manifest's names, and bound once by address."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.manifest import ModelInfo, Variant
from ...errors import BundleError
from ..memory import HostMemory

TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}


def check_signature(
    session: Any, graph: Path, variant: Variant, model: ModelInfo
) -> dict[str, tuple[int, ...]]:
    """The further dimensions of outputs that have several values for each position. Raises BundleError."""
    heads, entry = model.entry_shape(variant.kv_dtype, variant.kv_layout)
    shape = [None, None, entry] if variant.kv_layout == "cuda" else [None, heads, None, entry]
    kv_type = TYPES[variant.kv_dtype]
    in_place = variant.kv_layout != "appended"  # past and present are one buffer
    pasts = [f"past_key_values.{s}" for s in model.kv_suffixes]
    presents = [f"present.{s}" for s in model.kv_suffixes]
    graph_inputs = {i.name: i for i in session.get_inputs()}
    graph_outputs = {o.name: o for o in session.get_outputs()}
    mismatched = graph_inputs.keys() ^ {"input_ids", "kv_length", "output_index", *pasts}
    mismatched |= graph_outputs.keys() ^ {*variant.outputs, *presents}
    for name, info in [*graph_inputs.items(), *graph_outputs.items()]:
        is_kv = name.startswith(("past_key_values.", "present."))
        sizes = [n if wanted else None for n, wanted in zip(info.shape, shape, strict=False)]
        if is_kv and (len(info.shape), sizes, info.type) != (len(shape), shape, kv_type):
            mismatched.add(name)
    for past_name, present_name in zip(pasts, presents, strict=True):
        past, present = graph_inputs.get(past_name), graph_outputs.get(present_name)
        if past and present and (past.shape[-2] == present.shape[-2]) != in_place:
            mismatched.add(f"{present_name} (KV layout)")
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


MAX_SPARE_BYTES, MAX_SPARE = 256, 256  # numbers in a tensor that is kept for later steps, and such tensors


class Binding:
    """One IO binding, and the memory of all its tensors except the KV rows, which belong to the cache."""

    def __init__(self, session: Any) -> None:
        self._session, self._memory = session, HostMemory()
        self._io = session.io_binding()
        self._tensors: dict[str, Any] = {}
        self._spare: dict[tuple[str, tuple[int, ...]], Any] = {}  # small tensors by shape, for later steps

    def bind_rows(
        self,
        names: Sequence[tuple[str, str]],
        in_place: bool,
        buffers: Sequence[Any],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        offset: int,
    ) -> None:
        """Bind rows of KV tensors, `offset` bytes from their beginning, as inputs of `shape`, and
        as outputs if `in_place`. `names` are those of past and present.
        """
        for (past, present), buffer in zip(names, buffers, strict=True):
            place = ("cpu", 0, dtype, shape, buffer.address + offset)
            self._io.bind_input(past, *place)
            if in_place:
                self._io.bind_output(present, *place)

    def write(self, name: str, value: np.ndarray) -> None:
        """Set an input. The memory is reused while the shape is the same, because binding takes much longer
        than copying a few ids.
        """
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.shape == value.shape:
            tensor.write(value)
            return
        tensor = self._tensors[name] = self._tensor(name, value.shape, value.dtype)
        tensor.write(value)
        self._io.bind_input(name, "cpu", 0, value.dtype, value.shape, tensor.address)

    def expect(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Memory for an output."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape:
            tensor = self._tensors[name] = self._tensor(name, shape, dtype)
            self._io.bind_output(name, "cpu", 0, dtype, shape, tensor.address)
        return tensor

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Memory for a tensor whose shape has changed: that of an earlier step of this shape, or new."""
        if prod(shape) > MAX_SPARE_BYTES:
            return self._memory.tensor(shape, dtype)
        if (name, shape) not in self._spare:
            if len(self._spare) >= MAX_SPARE:
                self._spare.clear()  # bound tensors stay: `_tensors` has them
            self._spare[name, shape] = self._memory.tensor(shape, dtype)
        return self._spare[name, shape]

    def run(self) -> None:
        self._session.run_with_iobinding(self._io)

    def take(self, name: str) -> np.ndarray:
        """An output, without a copy if it is in host memory; the next step gets other memory."""
        tensor = self._tensors.pop(name)
        self._spare.pop((name, tensor.shape), None)
        array: np.ndarray = tensor.take()
        return array
