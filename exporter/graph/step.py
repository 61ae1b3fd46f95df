"""Writes the step graph: a forward over pending tokens, draft tokens and masks, with KV in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...runtime.bundle.manifest import FORMAT_VERSION
from ..codes import Codec
from . import attention, fused, heads, int8_kv, mtp, operators, recurrent
from .nodes import Nodes
from .spec import GraphSpec
from .weights import NUMPY_DTYPES, ONNX_DTYPES, Placed, shares_table, split_by_codec

# Added to the mask token's logit. It is finite because exp(-inf) * -inf, in the entropy, would be NaN.
NEVER = -1e9


def build(spec: GraphSpec, weights: Mapping[str, Placed], location: str, version: str) -> onnx.ModelProto:
    """Build the model, with its weights in the file `location` beside it. Deterministic."""
    writer = Writer(spec)
    writer.write()
    weights = {**weights, **mtp.own_weights(writer.nodes, weights)}
    if spec.options.is_cuda:  # its operators have one type for numbers, scales and sums
        floats = (w for w in weights.values() if w.dtype in NUMPY_DTYPES and w.dtype != writer.dtype)
        writer.nodes.cast([w.name for w in floats], ONNX_DTYPES[writer.dtype])
    graph = helper.make_graph(
        writer.nodes.nodes,
        "mars_step",
        spec.inputs(),
        spec.outputs(),
        [*writer.nodes.constants.values(), *(w.initializer(location) for w in weights.values())],
    )
    functions = [*writer.nodes.functions.values()]
    domains = {"": spec.versions[0]} | {node.domain: 1 for node in writer.nodes.nodes if node.domain}
    domains |= {function.domain: 1 for function in functions}
    model = helper.make_model(
        graph,
        functions=functions,
        opset_imports=[helper.make_opsetid(*item) for item in domains.items()],
        ir_version=spec.versions[1],
        producer_name="mars-export",
        producer_version=version,
    )
    helper.set_model_props(
        model,
        {
            "mars.format_version": FORMAT_VERSION,
            "mars.block": str(spec.options.block),
            "mars.kv_layout": spec.options.kv_layout or "in-place",
            "mars.precision": spec.options.weight_precision,
        },
    )
    return model


# The rows [batch * outputs, hidden] and their product with the vocabulary table: other places for a cut.
HEAD_INPUT, HEAD_PRODUCT = "head_rows_flat", "lm_head_product"


def hidden_after(layer: int) -> str:
    """The name of a layer's output [batch, slots, hidden], where a graph can be cut."""
    return f"layers.{layer}.mlp_residual"


class Writer:
    """Writes the decoder from input_ids to confidences.

    Shapes in comments: b rows, s slots, o outputs, c capacity, d head_dim.
    """

    def __init__(self, spec: GraphSpec) -> None:
        self.spec, self.dims, self.quirks, self.nodes = spec, spec.dims, spec.dims.quirks, Nodes()
        self.options, self.quantization = spec.options, spec.options.quantization
        self.dtype = spec.options.dtype
        self.kind = NUMPY_DTYPES[self.dtype]
        self.half = self.dtype != "float32"
        self.is_appended, self.is_cuda = spec.options.is_appended, spec.options.is_cuda
        self.has_int8_kv = spec.options.kv == "int8"
        self.is_batch_invariant = self.quantization is not None and not (
            self.half or self.is_appended or self.has_int8_kv
        )
        is_plain = not (self.half or self.is_appended or spec.mtp_drafts)
        self.is_fused = spec.options.precision == "w8a8" and is_plain and fused.fits(spec.dims)
        # A window as long as the context hides nothing.
        windows = self.dims.windows
        self.windows = [w if w is not None and w < self.dims.context_length else None for w in windows]
        self.masks: dict[int | None, str] = {}

    def empty(self) -> Writer:
        return Writer(self.spec)

    def write(self) -> None:
        factor = self.quirks.embedding_factor
        hidden = operators.scaled(
            self.nodes, self.embedding("input_ids"), factor, "scaled_embedding", self.kind
        )
        # [b, s, hidden]
        self.write_positions()
        if self.dims.recurrent is not None:
            recurrent.write_places(self.nodes, self.dims.recurrent)
        for i in range(self.dims.num_layers):
            self.nodes.scope(f"layers.{i}")
            hidden = self.write_layer(i, hidden)
        self.nodes.scope("")
        self.write_tail(hidden)

    def embedding(self, ids: str) -> str:
        table = "embed_tokens.weight"
        if self.quantization is None or self.quantization.embedding == "float":
            return self.nodes.add("Gather", table, ids, name="embedding")
        in_panels = self.dims.hidden_size if self.quantization.is_integer else None
        return operators.embedded(self.nodes, ids, table, ONNX_DTYPES[self.dtype], in_panels)

    # --- positions, rotary angles and causal masks: once for all layers ---

    def arange(self, name: str, source: str, axis: int) -> str:
        nodes = self.nodes
        length = nodes.add("Shape", source, name=f"num_{name}_1d", start=axis, end=axis + 1)
        scalar = nodes.add("Squeeze", length, name=f"num_{name}")
        return nodes.add("Range", ("zero", 0), scalar, ("one", 1), name=f"{name}_indices")

    def write_positions(self) -> None:
        nodes = self.nodes
        slots = self.arange("slots", "input_ids", 1)
        start = nodes.add("Unsqueeze", "kv_length", ("axis_1", [1]), name="kv_length_column")
        positions = nodes.add("Add", start, slots, name="positions")  # [b, s]
        axes = ("axes_1_3", [1, 3])
        column = nodes.add("Unsqueeze", positions, axes, name="positions_column")  # [b, 1, s, 1]
        if self.is_cuda:
            # [b], entries after the step. From `positions`: ONNX Runtime would add the number of
            # slots, a shape, on the CPU, and such a graph cannot be captured.
            end = nodes.add("Gather", positions, ("last", -1), name="last_position", axis=1)
            nodes.add("Add", end, ("one", 1), name="valid_length")
            if self.quirks.head_norms is not None:
                shape = nodes.add("Shape", "input_ids", name="step_shape")
                nodes.add("Concat", shape, ("all_heads", [-1]), name="packed_shape", axis=0)
        if not (self.has_int8_kv or (self.is_cuda and not any(self.windows))):
            self.write_masks(start, positions, column)
        kind = ONNX_DTYPES[self.dtype]
        heads.write_angles(nodes, self.dims, positions, kind, self.is_appended)
        if self.is_cuda and self.quirks.query_growth:
            column = nodes.add("Unsqueeze", positions, ("axis_2", [2]), name="positions_by_row")  # [b, s, 1]
        operators.query_growth(nodes, self.quirks, column, kind)
        if self.is_appended or (self.quirks.attention_cap and not self.is_cuda):
            attention.attention_scale(nodes, self.dims.attention_scale, kind)

    def write_masks(self, start: str, positions: str, column: str) -> None:
        nodes = self.nodes
        some = f"past_key_values.{self.dims.kv_layers[0]}.key"
        capacity = self.arange("capacity", some, 1 if self.is_cuda else 2)
        keys = attention.key_positions(nodes, capacity, start, positions) if self.is_appended else capacity
        causal = nodes.add(
            "LessOrEqual", keys, column, name="causal_mask"
        )  # [b, 1, s, c], appended [b, 1, s, c + s]
        for window in dict.fromkeys(self.windows):
            self.masks[window] = causal
            if window is not None:
                first = nodes.add("Sub", column, (f"window_{window}", window), name=f"window_{window}_start")
                inside = nodes.add("Greater", keys, first, name=f"window_{window}_inside")
                self.masks[window] = nodes.add("And", causal, inside, name=f"window_{window}_mask")
        if self.is_batch_invariant:
            attention.write_rows(nodes, self.dims)
            self.masks = {
                window: attention.rows_of(nodes, self.dims, mask) for window, mask in self.masks.items()
            }

    # --- one decoder layer ---

    def write_layer(self, i: int, hidden: str) -> str:
        if self.is_fused:
            opset, output = self.spec.versions[0], self.nodes.local("mlp_residual")
            q, k, v = fused.layer_start(self.nodes, self.dims, i, hidden, opset)
            return fused.layer_end(self.nodes, self.dims, i, hidden, self.attended(i, q, k, v), output, opset)
        norms = self.quirks.norms
        normed = self.norm(hidden, f"layers.{i}.input_norm", "input_normed", norms.before_attention)
        attended = (self.recurrent if self.dims.is_recurrent(i) else self.attention)(i, normed)
        attended = self.norm(attended, f"layers.{i}.attended_norm", "attended_normed", norms.after_attention)
        hidden = self.residual(hidden, attended, "attention_residual")
        normed = self.norm(hidden, f"layers.{i}.post_norm", "post_normed", norms.before_mlp)
        added = self.norm(self.mlp(i, normed), f"layers.{i}.mlp_norm", "mlp_normed", norms.after_mlp)
        return self.residual(hidden, added, "mlp_residual")

    def residual(self, hidden: str, added: str, name: str) -> str:
        if self.quirks.residual_factor != 1:
            factor = ("residual_factor", self.quirks.residual_factor, self.kind)
            added = self.nodes.add("Mul", added, factor, name=f"{name}_scaled")
        return self.nodes.add("Add", hidden, added, name=name)

    def attention(self, i: int, x: str) -> str:
        nodes, dims = self.nodes, self.dims
        packed = self.linear(x, f"layers.{i}.qkv", "qkv", dims.qkv_bias, self.quirks.qkv)

        def norm(x: str, module: str, name: str) -> str:
            return self.norm(x, f"layers.{i}.{module}", name)

        gate = ""
        if self.quirks.output_gate:
            packed, gate = heads.split_gate(nodes, dims, packed)
        if self.is_cuda:
            q, k, v = heads.flat_heads(nodes, dims, i, packed, norm)
        else:
            q, k, v = heads.split_heads(nodes, dims, i, packed, norm, self.is_appended)
        flat = self.attended(i, q, k, v)
        if gate:
            flat = nodes.add(
                "Mul", flat, nodes.add("Sigmoid", gate, name="output_gate_open"), name="attention_gated"
            )
        return self.linear(flat, f"layers.{i}.attention_output", "attention_output", dims.output_bias)

    def recurrent(self, i: int, x: str) -> str:
        assert self.dims.recurrent is not None
        packed = self.linear(x, f"layers.{i}.recurrent_in", "recurrent_in", False)
        made = recurrent.attend(self.nodes, self.dims.recurrent, i, packed, self.norm_f32)
        return self.linear(made, f"layers.{i}.recurrent_out", "recurrent_out", False)

    def attended(self, i: int, q: str, k: str, v: str) -> str:
        """Attention of layer i, [b, s, heads d]."""
        nodes, dims = self.nodes, self.dims
        if self.quirks.query_growth is not None:
            q = nodes.add("Mul", q, "query_growth", name="q_grown")
        if self.has_int8_kv:
            return int8_kv.attention(nodes, dims, i, q, k, v, self.spec.versions[0])
        if self.is_cuda:
            return self.scattered(i, q, k, v, self.masks[self.windows[i]] if self.windows[i] else "")
        mask = self.masks[self.windows[i]]
        kind = ONNX_DTYPES[self.dtype]
        mixed = (
            attention.appended_attention(nodes, dims, i, q, k, v, mask, kind)
            if self.is_appended
            else self.scattered(i, q, k, v, mask)
        )
        rows = nodes.add("Transpose", mixed, name="attention_rows", perm=[0, 2, 1, 3])
        flat = ("flat_heads", [0, 0, dims.num_heads * dims.head_dim])
        return nodes.add("Reshape", rows, flat, name="attention_flat")

    def scattered(self, i: int, q: str, k: str, v: str, mask: str) -> str:
        """Write k and v into layer i's buffers in place and attend over them: [b, heads, s, d], in the layout
        `cuda` [b, s, heads d].
        """
        nodes = self.nodes
        for name, update in (("key", k), ("value", v)):
            # Entries from kv_length on are overwritten, so that a rejected mask's entry lasts for one step.
            nodes.add(
                "TensorScatter",
                f"past_key_values.{i}.{name}",
                update,
                "kv_length",
                name=f"{name}_write",
                output=f"present.{i}.{name}",
                axis=1 if self.is_cuda else 2,
                mode="linear",
            )
        settings = operators.attention_settings(self.quirks)
        if self.is_cuda:
            # Without a mask, attention is causal up to a row's valid length: what CUDA's fast kernels take.
            inputs = (mask,) if mask else ("", "", "", "valid_length")
            settings |= {"q_num_heads": self.dims.num_heads, "kv_num_heads": self.dims.num_kv_heads}
            settings |= {} if mask else {"is_causal": 1}
            settings |= {"softcap": self.quirks.attention_cap} if self.quirks.attention_cap else {}
            kv = (f"present.{i}.key", f"present.{i}.value")
            return nodes.add("Attention", q, *kv, *inputs, name="attention", **settings)
        if self.is_batch_invariant:
            return attention.batch_invariant_attention(
                nodes, self.dims, q, f"present.{i}.key", f"present.{i}.value", mask
            )
        if self.quirks.attention_cap:
            kind = ONNX_DTYPES[self.dtype]
            return attention.attend(nodes, self.dims, q, f"present.{i}.key", f"present.{i}.value", mask, kind)
        return nodes.add(
            "Attention", q, f"present.{i}.key", f"present.{i}.value", mask, name="attention", **settings
        )

    def mlp(self, i: int, x: str) -> str:
        nodes, dims = self.nodes, self.dims
        packed = self.linear(x, f"layers.{i}.gate_up", "gate_up", dims.mlp_bias)
        sizes = ("gate_up_sizes", [dims.intermediate_size] * 2)
        gate, up = nodes.split(packed, sizes, ("gate", "up"), "gate_up_split")
        active = operators.activated(nodes, self.quirks, gate, self.kind, self.is_appended, self.is_cuda)
        return self.linear(
            nodes.add("Mul", active, up, name="gated"), f"layers.{i}.down", "down", dims.mlp_bias
        )

    def linear(self, x: str, weight: str, name: str, bias: bool, parts: Sequence[str] = ()) -> str:
        """x times `weight`; of maps of the checkpoint with different codecs, each has a product."""
        products = []
        for joined, _ in split_by_codec(name, parts or (name,), self.quantization):
            stored = f"{weight.removesuffix(name)}{joined}.weight"
            codec = self.quantization.codec(stored) if self.quantization else None
            products.append(self.product(x, stored, name if joined == name else f"{joined}_product", codec))
        product = products[0]
        if len(products) > 1:
            product = self.nodes.add("Concat", *products, name=name, axis=-1)
        if bias:
            product = self.nodes.add("Add", product, f"{weight}.bias", name=f"{name}_biased")
        return product

    def product(self, x: str, weight: str, name: str, codec: Codec | None) -> str:
        if codec is None:
            return self.nodes.add("MatMul", x, weight, name=name)
        if codec.multiplied:
            return operators.grouped_product(self.nodes, x, weight, codec, name, self.spec.versions[0])
        if self.quantization is not None and self.quantization.is_integer:
            return operators.integer_product(self.nodes, x, weight, name, self.spec.versions[0])
        return operators.dequantized(self.nodes, x, weight, codec, name)

    def norm(self, x: str, module: str, name: str, stored: str | None = "") -> str:
        """RMS norm over the last axis, always computed in fp32; x itself if the norm is not `stored`."""
        if stored is None:
            return x
        last = self.nodes.nodes[-1]
        if self.is_cuda and last.output[0] == x and x.endswith("_residual"):  # one kernel adds and normalizes
            hidden, added = self.nodes.nodes.pop().input
            inputs = [hidden, added, f"{module}.weight"]
            if added.endswith("_biased"):  # a bias, too
                inputs[1], bias = self.nodes.nodes.pop().input
                inputs.append(bias)
            return self.nodes.add_many(
                "SkipSimplifiedLayerNormalization",
                *inputs,
                name=name,
                outputs=[self.nodes.local(name), "", "", x],
                domain=operators.MICROSOFT,
                epsilon=self.dims.rms_norm_eps,
            )[0]
        if not self.half or self.is_cuda:
            return self.norm_f32(x, f"{module}.weight", name)
        wide = self.nodes.add("Cast", x, name=f"{name}_in", to=TensorProto.FLOAT)
        normed = self.norm_f32(wide, f"{module}.weight", f"{name}_f32")
        return self.nodes.add("Cast", normed, name=name, to=ONNX_DTYPES[self.dtype])

    def norm_f32(self, x: str, scale: str, name: str) -> str:
        epsilon = self.dims.rms_norm_eps
        if self.is_appended:
            return attention.rms_norm(self.nodes, x, scale, name, epsilon)
        return self.nodes.add("RMSNormalization", x, scale, name=name, epsilon=epsilon)

    # --- the head: the rows of output_index only, confidences in fp32 ---

    def write_tail(self, hidden: str) -> None:
        nodes, spec = self.nodes, self.spec
        if self.is_cuda:
            hidden = self.norm(hidden, "norm", "final_normed")
        index = nodes.add("Unsqueeze", "output_index", ("axis_2", [2]), name="output_index_column")
        rows = nodes.add("GatherND", hidden, index, name="head_rows", batch_dims=1)  # [b, o, hidden]
        rows = rows if self.is_cuda else self.norm(rows, "norm", "head_rows_normed")
        nodes.scope("known" if spec.mtp_drafts else "")
        # Only ONNX Runtime on a CPU runs graphs with 8-bit activations.
        is_integer = self.quantization is not None and self.quantization.is_integer
        operators.write_predictions(
            nodes, self.logits(rows), self.options.metrics, self.options.top_k, in_one_pass=is_integer
        )
        if spec.mtp_drafts:
            mtp.write(self, hidden, spec.mtp_drafts, self.options.outputs)

    def head(self, normed: str, table: str = "lm_head.weight") -> str:
        """fp32 logits [b * o, tokens] of normed hidden states [b, o, hidden]."""
        nodes, dims = self.nodes, self.dims
        flat = nodes.add("Reshape", normed, ("flat_hidden", [-1, dims.hidden_size]), name=HEAD_INPUT)
        codec = self.quantization.table(self.quantization.head) if self.quantization else None
        if codec is None:
            if table == "lm_head.weight" and shares_table(dims, self.quantization):
                table = "embed_tokens.weight"
            raw = nodes.add("Gemm", flat, table, name=HEAD_PRODUCT, transB=1)
        else:
            raw = self.product(flat, table, HEAD_PRODUCT, codec)
        if self.half:
            raw = nodes.add("Cast", raw, name="lm_head_f32", to=TensorProto.FLOAT)
        raw = operators.scaled(nodes, raw, self.quirks.logit_factor, "logits_scaled", np.dtype(np.float32))
        return operators.capped(nodes, raw, self.quirks.logit_cap, "logits_capped")

    def logits(self, normed: str) -> str:
        """fp32 logits [b, o, vocab] of normed hidden states [b, o, hidden]."""
        nodes, dims, spec = self.nodes, self.dims, self.spec
        raw = self.head(normed)
        shape = nodes.add("Shape", "output_index", name="output_shape")
        full = nodes.add("Concat", shape, ("vocab", [dims.vocab_size]), name="logits_shape", axis=0)
        by_row = nodes.add("Reshape", raw, full, name="logits_rows")
        never = np.zeros(dims.vocab_size, np.float32)
        if spec.mask_token_id is not None:
            never[spec.mask_token_id] = NEVER
        # Added after the Reshape: ONNX Runtime would fuse MatMul and Add to a Gemm, and then decode the whole
        # table in every step.
        bias = ("mask_token_bias", never, np.float32)
        return nodes.add("Add", by_row, bias, name="allowed", output=nodes.local("logits"))
