"""Decoder families: config.json -> dimensions and the exact tensors a model must have.

The differences are flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...runtime.errors import CheckpointError
from . import names
from .rope import Rope, positive, rope_from_config
from .tensors import listed, shown

# The authors' A2D classes hold stock weights under stock names, and MARS inference is plain causal.
ALIASES = {"a2d-qwen2": "qwen2", "a2d-qwen3": "qwen3", "a2d-qwen3-it": "qwen3"}
# The largest number of each field that is taken seriously: a reader, and this exporter, allocate from them.
LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**31,
}


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one decoder family from another; None means that the config decides.

    `defaults`: what transformers assumes for a field that config.json leaves out (not for one that is null).
    """

    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    sliding: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
    "mistral": Family(sliding=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, sliding=True, defaults=QWEN_DEFAULTS),
    "qwen3": Family(
        qkv_bias=None,
        output_bias=None,
        qk_norm=True,
        sliding=True,
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
    ),
}


@dataclass(frozen=True, slots=True)
class Dims:
    """The shape of a decoder.

    `windows[i]` is layer i's sliding window in tokens, or None for full causal attention.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]


def dims_from_config(config: Mapping[str, Any]) -> Dims:
    """Read the dimensions of a Hugging Face `config.json`.

    Raises CheckpointError for an unknown architecture (naming the known ones), for missing or senseless
    numbers (all at once) and for features that would change the result if they were ignored.
    """
    declared = str(config.get("model_type"))
    model_type = ALIASES.get(declared, declared)
    if model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, *ALIASES])
        raise CheckpointError(
            f"config.json: architecture `{declared[:80]}` is not supported (known: {known})"
        )
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    _refuse_unknown_features(config)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = (
        _count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    )
    head_dim = _count(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"config.json: no head_dim, and hidden_size {hidden} is not a multiple of {heads} heads"
        )
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"config.json: {heads} heads over {kv_heads} key/value heads of size {head_dim} do not fit"
            " together"
        )
    num_layers, context = _count(config, "num_hidden_layers"), _count(config, "max_position_embeddings")
    rope = rope_from_config(config, head_dim)
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return Dims(
        model_type=model_type,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=min(max(context, rope.context), LIMITS["max_position_embeddings"]),
        rms_norm_eps=positive(config, "rms_norm_eps") if "rms_norm_eps" in config else 1e-6,
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        # The authors' A2D classes never window, whatever their config says.
        windows=(None,) * num_layers
        if declared in ALIASES
        else _windows(config, model_type, family, num_layers),
    )


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: `{name}` must be a positive integer, not {shown(value)}")
    if value > LIMITS.get(name, 2**31):
        raise CheckpointError(
            f"config.json: `{name}` is {shown(value)}, beyond the {LIMITS.get(name, 2**31)} that any model"
            " has"
        )
    return value


def _refuse_unknown_features(config: Mapping[str, Any]) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(
            f"config.json: hidden_act `{str(activation)[:80]}` is not supported (known: silu)"
        )


def _windows(
    config: Mapping[str, Any], model_type: str, family: Family, num_layers: int
) -> tuple[int | None, ...]:
    on = (
        family.sliding
        and config.get("sliding_window") is not None
        and (model_type == "mistral" or config.get("use_sliding_window"))
    )
    if not on:
        return (None,) * num_layers
    window = _count(config, "sliding_window")
    if model_type == "mistral":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = _count(config, "max_window_layers") if config.get("max_window_layers") else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("sliding_attention", "full_attention") for kind in kinds)
    ):
        raise CheckpointError(
            "config.json: `layer_types` must name full_attention or sliding_attention for each of"
            f" {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def expected_shapes(dims: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of each tensor the model must have, Linear weights as [out, in]."""
    hidden, inner = dims.hidden_size, dims.intermediate_size
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    linears = {
        names.Q: (queries, hidden, dims.qkv_bias),
        names.K: (keys, hidden, dims.qkv_bias),
        names.V: (keys, hidden, dims.qkv_bias),
        names.O: (hidden, queries, dims.output_bias),
        names.GATE: (inner, hidden, dims.mlp_bias),
        names.UP: (inner, hidden, dims.mlp_bias),
        names.DOWN: (hidden, inner, dims.mlp_bias),
    }
    yield names.EMBEDDING, (dims.vocab_size, hidden)
    for i in range(dims.num_layers):
        for part, (rows, columns, bias) in linears.items():
            yield names.weight(i, part), (rows, columns)
            if bias:
                yield names.bias(i, part), (rows,)
        if dims.qk_norm:
            yield names.weight(i, names.Q_NORM), (dims.head_dim,)
            yield names.weight(i, names.K_NORM), (dims.head_dim,)
        yield names.weight(i, names.INPUT_NORM), (hidden,)
        yield names.weight(i, names.POST_NORM), (hidden,)
    yield names.FINAL_NORM, (hidden,)
    if not dims.tied:
        yield names.HEAD, (dims.vocab_size, hidden)


def check_shapes(dims: Dims, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError that lists every missing, extra and misshapen tensor at once."""
    expected = dict(expected_shapes(dims))
    if problem := _other_names(shapes):
        raise CheckpointError(problem)
    ignored = {names.HEAD} if dims.tied else set()
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in shapes]
    problems += [
        f"not part of a {dims.model_type} model: {name}"
        for name in shapes
        if name not in expected and name not in ignored and not name.endswith(names.ROTARY_COPY)
    ]
    problems += [
        f"misshapen: {name} is {list(shapes[name])}, config.json implies {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if problems:
        raise CheckpointError(
            f"{len(problems)} tensors do not fit config.json:\n  " + listed(problems, "\n  ")
        )


def _other_names(shapes: Mapping[str, object]) -> str | None:
    """One line where all names are there behind another prefix, as AutoModel or a wrapper saves them."""
    first = f"{names.layer(0)}{names.INPUT_NORM}.weight"
    inner = first.removeprefix("model.")
    theirs = next((name for name in shapes if name.endswith(inner)), None)
    if theirs is None or first in shapes:
        return None
    prefix = theirs.removesuffix(inner)
    return (
        f"the tensors' names begin with `{prefix}layers.` where `model.layers.` is expected: save the whole"
        " causal"
        " model, `AutoModelForCausalLM.from_pretrained(path).save_pretrained(other)`, and export that"
    )
