"""Writes the step graph of a hybrid: gated delta net (Qwen3.5's linear layers) and full attention.

Shapes in comments: b rows, t slots, n slots of the catch-up, c capacity, r ring, w = kernel - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mars_export.exporter.graph.nodes import Nodes

OPSETS, IR_VERSION = {"": 24, "com.microsoft": 1}, 11
# ONNX Runtime has kernels for its own form of these two only: ai.onnx's become a Scan, which takes 3 to 5
# times as long.
LINEAR, CONVOLUTION = "LinearAttention", "CausalConvWithState"
NOTHING = ("nothing", 0, np.float32)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a checkpoint, and which layers are linear."""

    linear: tuple[bool, ...]
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int  # of linear layers
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int
    epsilon: float

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def entry(self) -> int:
        """Numbers that a linear layer keeps of a position: inputs of the convolution, and both gates."""
        return self.mixed + 2 * self.value_heads

    def memory(self, layer: int, rows: int, capacity: int, ring: int) -> dict[str, tuple[int, ...]]:
        """What a layer keeps between steps: names and shapes."""
        if self.linear[layer]:
            state = (rows, self.value_heads, self.key_dim, self.value_dim)
            return {f"{layer}.inputs": (rows, ring, self.entry), f"{layer}.state": state}
        shape = (rows, self.kv_heads, capacity, self.head_dim)
        return {f"{layer}.key": shape, f"{layer}.value": shape}


class Writer:
    """`rope`: cosines and sines [positions, rotated / 2]. Weights have transformers' names."""

    def __init__(
        self, shape: Shape, weights: Mapping[str, np.ndarray], rope: tuple[np.ndarray, np.ndarray]
    ) -> None:
        self.shape, self.weights, self.rope = shape, weights, rope
        self.nodes, self.tensors = Nodes(), dict[str, onnx.TensorProto]()

    def model(self) -> onnx.ModelProto:
        hidden = self.add("Gather", self.weight("embed_tokens.weight"), "input_ids", name="embedding")
        self.write_positions()
        for i, is_linear in enumerate(self.shape.linear):
            self.nodes.scope(f"layers.{i}")
            normed = self.norm(hidden, f"layers.{i}.input_layernorm.weight", "input_norm", plus=1)
            mixed = self.linear_attention(i, normed) if is_linear else self.full_attention(i, normed)
            hidden = self.add("Add", hidden, mixed, name="attention_residual")
            hidden = self.add("Add", hidden, self.mlp(i, hidden), name="mlp_residual")
        self.nodes.scope("")
        normed = self.norm(hidden, "norm.weight", "final_norm", plus=1)
        logits = self.add("MatMul", normed, self.weight("lm_head", turned=True), name="logits")
        self.add("ArgMax", logits, name="token", output="token_ids", axis=-1, keepdims=0)
        likely = self.add("Softmax", logits, name="probabilities", axis=-1)
        self.add("ReduceMax", likely, ("axis_-1", [-1]), name="likely", output="confidence", keepdims=0)
        return self.finished()

    def finished(self) -> onnx.ModelProto:
        int64 = TensorProto.INT64
        inputs = [helper.make_tensor_value_info("input_ids", int64, ["b", "t"])]
        inputs += [helper.make_tensor_value_info(n, int64, ["b"]) for n in ("kv_length", "state_length")]
        inputs.append(helper.make_tensor_value_info("catch_up", int64, [1]))
        outputs = [helper.make_tensor_value_info("token_ids", int64, ["b", "t"])]
        outputs.append(helper.make_tensor_value_info("confidence", TensorProto.FLOAT, ["b", "t"]))
        for i in range(len(self.shape.linear)):
            for name, sizes in self.shape.memory(i, 1, 1, 1).items():
                growing = {"inputs": 1, "key": 2, "value": 2}.get(name.partition(".")[2])
                dims = ["b", *(f"{name}_size" if k == growing else d for k, d in enumerate(sizes) if k)]
                inputs.append(helper.make_tensor_value_info(f"past.{name}", TensorProto.FLOAT, dims))
                outputs.append(helper.make_tensor_value_info(f"present.{name}", TensorProto.FLOAT, dims))
        initializers = [*self.nodes.constants.values(), *self.tensors.values()]
        graph = helper.make_graph(self.nodes.nodes, "hybrid_step", inputs, outputs, initializers)
        opsets = [helper.make_opsetid(*item) for item in OPSETS.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def add(self, op: str, *inputs: Any, name: str, **attributes: Any) -> str:
        return self.nodes.add(op, *inputs, name=name, **attributes)

    def fused(self, op: str, *inputs: str, name: str, outputs: list[str], **attributes: Any) -> None:
        self.nodes.add_many(op, *inputs, name=name, outputs=outputs, domain="com.microsoft", **attributes)

    def weight(self, name: str, turned: bool = False, plus: float = 0) -> str:
        if name not in self.tensors:
            source = self.weights["lm_head.weight" if name == "lm_head" else f"model.{name}"]
            array = np.ascontiguousarray((source.T if turned else source) + np.float32(plus))
            self.tensors[name] = numpy_helper.from_array(array, name)
        return name

    def linear(self, x: str, module: str, name: str) -> str:
        return self.add("MatMul", x, self.weight(f"{module}.weight", turned=True), name=name)

    def norm(self, x: str, weight: str, name: str, plus: float = 0) -> str:
        scale = self.weight(weight, plus=plus)
        return self.add("RMSNormalization", x, scale, name=name, epsilon=self.shape.epsilon)

    def heads(self, x: str, count: int, size: int, name: str) -> str:
        return self.add("Reshape", x, (f"heads_{count}_{size}", [0, 0, count, size]), name=name)

    def flat(self, x: str, name: str) -> str:
        return self.add("Reshape", x, ("flat", [0, 0, -1]), name=name)

    def silu(self, x: str, name: str) -> str:
        return self.add("Mul", x, self.add("Sigmoid", x, name=f"{name}_sigmoid"), name=name)

    def write_positions(self) -> None:
        """For each slot its position; for linear layers which entries the catch-up reads, and which of them
        the state does not have yet.
        """
        w, zero, one = self.shape.kernel - 1, ("zero", 0), ("one", 1)
        start = self.add("Unsqueeze", "kv_length", ("axis_1", [1]), name="start")
        num_slots = self.add("Shape", "input_ids", name="num_slots", start=1, end=2)
        slots = self.add("Range", zero, self.add("Squeeze", num_slots, name="slots_0d"), one, name="slots")
        self.add("Add", start, slots, name="positions")  # [b, t]
        self.add("Concat", "catch_up", num_slots, name="two_parts", axis=0)
        end = self.add("Squeeze", "catch_up", name="catch_up_0d")
        back = self.add("Range", ("minus_w", -w), end, one, name="back")
        first = self.add("Sub", start, "catch_up", name="first")
        read = self.add("Add", first, back, name="read")  # [b, w + n]
        known = self.add("GreaterOrEqual", read, ("zeros_1", [0]), name="known")
        self.add("Unsqueeze", known, ("axis_2", [2]), name="is_read")
        state = self.add("Unsqueeze", "state_length", ("axis_1", [1]), name="state_column")
        wanted = self.add("GreaterOrEqual", read, state, name="wanted")
        wanted = self.later(wanted, "wanted_later")
        self.add("Unsqueeze", wanted, ("axis_2", [2]), name="is_wanted")  # [b, n, 1]
        column = self.add("Unsqueeze", "positions", ("axes_1_3", [1, 3]), name="positions_column")
        full = self.shape.linear.index(False)
        size = self.add("Shape", f"past.{full}.key", name="capacity_1d", start=2, end=3)
        keys = self.add("Range", zero, self.add("Squeeze", size, name="capacity"), one, name="keys")
        self.add("LessOrEqual", keys, column, name="causal")  # [b, 1, t, c]
        for name, array in zip(("cosines", "sines"), self.rope, strict=True):
            self.tensors[name] = numpy_helper.from_array(array, name)

    def linear_attention(self, i: int, x: str) -> str:
        """Two nodes: the state catches up with what became final in the last step, then all slots attend
        from there. Guesses never reach the state.
        """
        s, module = self.shape, f"layers.{i}.linear_attn"
        parts = [self.linear(x, f"{module}.in_proj_{part}", f"new_{part}") for part in ("qkv", "a", "b")]
        new = self.add("Concat", *parts, name="entries", axis=2)  # [b, t, entry]
        window = self.window(i, new)
        sizes = ("entry_sizes", [s.mixed, 2 * s.value_heads])
        qkv, gates = self.nodes.split(window, sizes, ("qkv_window", "gates_window"), "window_parts")
        q, k, v = self.convolved(module, qkv)
        gates = self.later(gates, "gates")
        a, b = self.nodes.split(gates, ("both", [s.value_heads] * 2), ("dt", "b"), "gates_parts")
        step = self.add("Add", a, self.weight(f"{module}.dt_bias"), name="dt_sum")
        rate = (f"{module}.rate", -np.exp(self.weights[f"model.{module}.A_log"]), np.float32)
        decay = self.add("Mul", self.add("Softplus", step, name="step"), rate, name="decay")
        beta = self.add("Sigmoid", b, name="beta")
        then, now = [], []  # the slots of the catch-up, and of this step
        for name, part in {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}.items():
            names = f"{name}_then", f"{name}_now"
            old, new = self.nodes.split(part, "two_parts", names, f"{name}_parts", axis=1)
            if name in ("decay", "beta"):
                old = self.add("Where", "is_wanted", old, NOTHING, name=f"{name}_wanted")
            then.append(old)
            now.append(new)
        settings = {"q_num_heads": s.value_heads, "kv_num_heads": s.value_heads}
        state = f"present.{i}.state"
        caught_up = (*then[:3], f"past.{i}.state", *then[3:])
        outputs = [self.nodes.local("unused"), state]
        self.fused(LINEAR, *caught_up, name="catch_up", outputs=outputs, **settings)
        ahead = (*now[:3], state, *now[3:])
        outputs = [self.nodes.local("mixed"), self.nodes.local("guessed_state")]
        self.fused(LINEAR, *ahead, name="ahead", outputs=outputs, **settings)
        mixed = self.heads(outputs[0], s.value_heads, s.value_dim, "mixed_heads")
        normed = self.flat(self.norm(mixed, f"{module}.norm.weight", "mixed_norm"), "normed")
        gate = self.silu(self.linear(x, f"{module}.in_proj_z", "z"), "gate")
        return self.linear(self.add("Mul", normed, gate, name="gated"), f"{module}.out_proj", "out")

    def window(self, i: int, new: str) -> str:
        """The entries of the catch-up and of this step, with w before them: [b, w + n + t, entry]."""
        ring = self.add("Shape", f"past.{i}.inputs", name="ring", start=1, end=2)
        places = self.add("Mod", "read", ring, name="ring_places")
        places = self.add("Unsqueeze", places, ("axis_2", [2]), name="ring_index")
        old = self.add("GatherND", f"past.{i}.inputs", places, name="ring_read", batch_dims=1)
        old = self.add("Where", "is_read", old, NOTHING, name="old")
        write = self.add("Mod", "kv_length", ring, name="ring_write")
        self.add(
            "TensorScatter", f"past.{i}.inputs", new, write, name="inputs_write",
            output=f"present.{i}.inputs", axis=1, mode="circular",
        )  # fmt: skip
        return self.add("Concat", old, new, name="window", axis=1)

    def later(self, x: str, name: str) -> str:
        """Without the first w, which belong to a convolution that begins too early: [b, n + t, ...]."""
        return self.add(
            "Slice", x, ("w_1d", [self.shape.kernel - 1]), ("far", [2**31]), ("axis_1", [1]), name=name
        )

    def convolved(self, module: str, window: str) -> tuple[str, str, str]:
        """Queries and keys of length one for each value head, and values: [b, n + t, value heads * size]."""
        s = self.shape
        turned = self.add("Transpose", window, name="channels_first", perm=[0, 2, 1])
        inputs = turned, self.weight(f"{module}.conv1d.weight")
        outputs = [self.nodes.local("convolved"), self.nodes.local("unused_inputs")]
        self.fused(CONVOLUTION, *inputs, name="conv", outputs=outputs, activation="silu")
        rows = self.later(self.add("Transpose", outputs[0], name="channels_last", perm=[0, 2, 1]), "rows")
        keys = s.key_heads * s.key_dim
        sizes = ("qkv_sizes", [keys, keys, s.value_heads * s.value_dim])
        q, k, v = self.nodes.split(rows, sizes, ("q", "k", "v"), "qkv_parts")
        # x / sqrt(sum(x * x) + 1e-6) is this norm with the weight 1 / sqrt(size) and epsilon 1e-6 / size
        one = ("unit", np.full(s.key_dim, s.key_dim**-0.5), np.float32)
        found = []
        for name, part in (("q", q), ("k", k)):
            split = self.heads(part, s.key_heads, s.key_dim, f"{name}_heads")
            unit = self.add("RMSNormalization", split, one, name=f"{name}_unit", epsilon=1e-6 / s.key_dim)
            serves = s.value_heads // s.key_heads
            owner = ("owner", np.arange(s.value_heads) // serves)
            if serves > 1:
                unit = self.add("Gather", unit, owner, name=f"{name}_repeated", axis=2)
            found.append(self.flat(unit, f"{name}_flat"))
        return found[0], found[1], v

    def full_attention(self, i: int, x: str) -> str:
        s, module = self.shape, f"layers.{i}.self_attn"
        both = self.heads(self.linear(x, f"{module}.q_proj", "q_and_gate"), s.heads, 2 * s.head_dim, "pairs")
        q, gate = self.nodes.split(both, ("pair", [s.head_dim] * 2), ("q", "gate"), "q_gate_split")
        k = self.heads(self.linear(x, f"{module}.k_proj", "k"), s.kv_heads, s.head_dim, "k_heads")
        v = self.heads(self.linear(x, f"{module}.v_proj", "v"), s.kv_heads, s.head_dim, "v_heads")
        rotated = []
        for name, part in (("q", q), ("k", k)):
            part = self.norm(part, f"{module}.{name}_norm.weight", f"{name}_norm", plus=1)
            part = self.add("Transpose", part, name=f"{name}_by_head", perm=[0, 2, 1, 3])
            size = 2 * self.rope[0].shape[1]
            inputs = (part, "cosines", "sines", "positions")
            rotated.append(
                self.add("RotaryEmbedding", *inputs, name=f"{name}_rotated", rotary_embedding_dim=size)
            )
        v = self.add("Transpose", v, name="v_by_head", perm=[0, 2, 1, 3])
        for name, part in (("key", rotated[1]), ("value", v)):
            memory = f"past.{i}.{name}", part, "kv_length"
            self.add("TensorScatter", *memory, name=f"{name}_write", output=f"present.{i}.{name}", axis=2)
        memory = f"present.{i}.key", f"present.{i}.value", "causal"
        mixed = self.add("Attention", rotated[0], *memory, name="attention")
        mixed = self.flat(self.add("Transpose", mixed, name="by_slot", perm=[0, 2, 1, 3]), "mixed")
        gate = self.add("Sigmoid", self.flat(gate, "gate_flat"), name="gate_sigmoid")
        return self.linear(self.add("Mul", mixed, gate, name="gated"), f"{module}.o_proj", "out")

    def mlp(self, i: int, x: str) -> str:
        module = f"layers.{i}.mlp"
        normed = self.norm(x, f"layers.{i}.post_attention_layernorm.weight", "post_norm", plus=1)
        gate = self.silu(self.linear(normed, f"{module}.gate_proj", "mlp_gate"), "mlp_active")
        up = self.linear(normed, f"{module}.up_proj", "mlp_up")
        return self.linear(self.add("Mul", gate, up, name="mlp_gated"), f"{module}.down_proj", "mlp_down")
