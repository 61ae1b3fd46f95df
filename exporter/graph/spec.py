"""The settings, inputs and outputs of a step graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from ...runtime.bundle.manifest import SCALE_BYTES
from ..checkpoint.dims import Dims
from ..export_options import ExportOptions
from .weights import ONNX_DTYPES

# (opset, IR version). `appended` is for older TensorRT: plain operators of an old opset. Opset 21 introduced
# the blocks of int4 and int8.
IN_PLACE_OPSET, APPENDED_OPSET, APPENDED_CODES_OPSET = (24, 11), (18, 8), (21, 10)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """The settings of a step graph. `mtp_drafts`: tokens that the MTP layer proposes in each step."""

    dims: Dims
    options: ExportOptions
    mask_token_id: int | None
    mtp_drafts: int = 0

    @property
    def versions(self) -> tuple[int, int]:
        """The opset and the IR version."""
        if not self.options.is_appended:
            return IN_PLACE_OPSET
        return APPENDED_CODES_OPSET if self.options.quantization else APPENDED_OPSET

    def inputs(self) -> list[onnx.ValueInfoProto]:
        rows = {"input_ids": ["batch", "slots"], "kv_length": ["batch"], "output_index": ["batch", "outputs"]}
        rows |= {"state_length": ["batch"]} if self.dims.recurrent else {}
        return [*_infos(TensorProto.INT64, rows), *self._memory("past_key_values", "capacity")]

    def outputs(self) -> list[onnx.ValueInfoProto]:
        options, drafts = self.options, f"_and_{self.mtp_drafts}_drafts" if self.mtp_drafts else ""
        rows = ["batch", f"outputs{drafts}"]
        widths = {"topk_ids": options.top_k, "topk_logprobs": options.top_k, "logits": self.dims.vocab_size}
        shapes = {name: [*rows, widths[name]] if name in widths else rows for name in options.outputs}
        kinds = [
            TensorProto.INT64 if name in ("token_ids", "topk_ids") else TensorProto.FLOAT for name in shapes
        ]
        infos = map(helper.make_tensor_value_info, shapes, kinds, shapes.values())
        return [*infos, *self._memory("present", "slots" if options.is_appended else "capacity")]

    def _memory(self, prefix: str, entries: str) -> Iterator[onnx.ValueInfoProto]:
        """The states of recurrent layers, then KV tensors with `entries` entries a row."""
        dims, options, net = self.dims, self.options, self.dims.recurrent
        if net is not None:
            inputs, state = (
                ["batch", f"outputs_and_{net.kernel - 1}", net.entry],
                ["batch", net.value_heads, net.key_dim, net.value_dim],
            )
            for i in net.layers:
                yield from _infos(
                    TensorProto.FLOAT, {f"{prefix}.{i}.inputs": inputs, f"{prefix}.{i}.state": state}
                )
        kind, width = ONNX_DTYPES[options.dtype], dims.head_dim
        if options.kv == "int8":
            kind, width = TensorProto.INT8, width + SCALE_BYTES
        heads = dims.num_kv_heads
        shape = ["batch", entries, heads * width] if options.is_cuda else ["batch", heads, entries, width]
        layers = [*dims.kv_layers, *([dims.num_layers] if self.mtp_drafts else [])]
        yield from _infos(kind, {f"{prefix}.{i}.{part}": shape for i in layers for part in ("key", "value")})


def _infos(kind: int, shapes: Mapping[str, list[Any]]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
