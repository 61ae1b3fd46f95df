"""The dimensions of a decoder from its config.json, and the tensors that it must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from ...runtime.errors import CheckpointError, listed
from ...runtime.rules import is_integer
from . import names
from .families import FAMILIES, MIMO_MTP, QWEN_MTP, Family, Mtp, Quirks, has_bias, refusal
from .stock import ALIASES, FULL, SLIDING, Rope, rope, stock_config, text_config, windows
from .tensors import reading, shown

COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "full_attention_interval"),
    *(f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")),
    "linear_conv_kernel_dim",
)
# The largest accepted numbers, because this exporter and readers of bundles allocate memory by them.
MAX_LAYERS, MAX_SIZE = 2**12, 2**24


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The gated delta nets of a hybrid, in place of attention in its `layers`.

    Each key head serves `value_heads / key_heads` neighbouring value heads. `kernel`: tokens that the causal
    convolution of queries, keys and values reads.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def entry(self) -> int:
        """Numbers that a layer keeps of a token until its state has it: the convolution's inputs, decays and
        rates.
        """
        return self.mixed + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class Dims:
    """The shape of a decoder, and its differences from Llama.

    `mtp`: a multi-token prediction layer follows the `num_layers` others. It predicts the token after the
    next one, from the last hidden state and the next token; `rotation` and `windows` have an entry for it.
    `shortlist`: the tokens that it proposes; empty: all.
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
    ropes: tuple[Rope, ...]
    rotation: tuple[int | None, ...]  # for each layer the index of its rope, or None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # for each layer its sliding window in tokens, or None for full attention
    quirks: Quirks
    mtp: Mtp | None = None
    recurrent: Recurrent | None = None
    shortlist: tuple[int, ...] = ()

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer in self.recurrent.layers

    def prefix(self, layer: int) -> str:
        """The prefix of the names of a layer in the checkpoint; the MTP layer follows the others."""
        return self.mtp.layer if self.mtp and layer == self.num_layers else names.layer(layer)

    @property
    def kv_layers(self) -> list[int]:
        """The layers with KV entries, without an MTP layer."""
        return [i for i in range(self.num_layers) if not self.is_recurrent(i)]

    def mixer(self, layer: int) -> tuple[tuple[str, ...], str]:
        """The stored maps of a layer's input, and the one of what its attention or recurrence gives."""
        if self.is_recurrent(layer):
            return names.RECURRENT_IN, names.RECURRENT_OUT
        return self.quirks.qkv, names.O

    def rope(self, layer: int) -> Rope | None:
        """The rotary embedding of layer `layer`, or None."""
        which = self.rotation[layer]
        return None if which is None else self.ropes[which]

    @property
    def attention_scale(self) -> float:
        """The factor of scores before the softmax."""
        scale = self.quirks.attention_scale
        return self.head_dim**-0.5 if scale is None else scale


def dims_from_config(values: Mapping[str, Any], *, long_context: bool = False) -> Dims:
    """Read the dimensions of a Hugging Face `config.json`; fields that it omits have transformers' defaults.

    `long_context`: use the rotary frequencies for long texts of a model that has two sets. Raises
    CheckpointError for an unknown architecture, for missing or senseless numbers, and for features that would
    change the result if they were ignored.
    """
    declared = str(values.get("model_type"))
    model_type = ALIASES.get(declared, declared)
    if reason := refusal(declared):
        raise CheckpointError(f"config.json: architecture `{declared}` is not supported: {reason}")
    if model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, *ALIASES])
        raise CheckpointError(
            f"config.json: architecture `{declared[:80]}` is not supported (known: {known})"
        )
    values = text_config(values)
    _check_counts(values)
    family, config = FAMILIES[model_type], stock_config(values, long_context=long_context)
    with reading("config.json"):
        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json: {heads} heads over {kv_heads} key/value heads of size {head_dim} do not fit"
                " together"
            )
        slides = (None,) * config.num_hidden_layers
        if family.windows != "no layer":
            slides = windows(config, family.windows == "typed")
        ropes, rotation = _rotations(config, family, slides, long_context)
        if wrong := [n for rope in ropes if not 0 < (n := 2 * rope.inv_freq.size) <= head_dim]:
            raise CheckpointError(
                f"config.json: its rope parameters (`partial_rotary_factor`) rotate {wrong[0]} of the"
                f" {head_dim} numbers of a head"
            )
        if mtp := _mtp(values):
            slides, rotation = (*slides, slides[0]), (*rotation, rotation[0])
        context = max(config.max_position_embeddings, *(rope.context for rope in ropes))
        limits = (rope.limit for rope in ropes if rope.limit)
        return Dims(
            model_type=model_type,
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=min(context, *limits, MAX_SIZE),
            rms_norm_eps=float(config.rms_norm_eps),
            ropes=ropes,
            rotation=rotation,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=has_bias(family.qkv_bias, config),
            output_bias=has_bias(family.output_bias, config),
            mlp_bias=has_bias(family.mlp_bias, config),
            windows=slides,
            quirks=family.quirks_of(config),
            mtp=mtp,
            recurrent=_recurrent(config) if family.recurrent else None,
        )


def _recurrent(config: Any) -> Recurrent:
    layers = tuple(i for i, kind in enumerate(config.layer_types) if kind != FULL)
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if not 0 < len(layers) < config.num_hidden_layers or value_heads % key_heads:
        raise CheckpointError(
            f"config.json: {len(layers)} recurrent layers of {config.num_hidden_layers}, with {value_heads}"
            f" value heads for {key_heads} key heads: some layers must be {FULL}, some linear_attention, and"
            " key heads must share the value heads equally"
        )
    sizes = (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)
    return Recurrent(layers, key_heads, value_heads, *sizes)


def _mtp(values: Mapping[str, Any]) -> Mtp | None:
    """The form of the checkpoint's MTP layer, if config.json has one."""
    forms = {"mimo": (MIMO_MTP, "num_nextn_predict_layers")}
    forms |= dict.fromkeys(("qwen3_5", "qwen3_5_text"), (QWEN_MTP, "mtp_num_hidden_layers"))
    form, name = forms.get(str(values.get("model_type")), (None, ""))
    count = values.get(name, 0)
    if not is_integer(count, 0) or count > 1:
        raise CheckpointError(
            f"config.json: `{name}` must be 0 or 1 MTP layer, not {shown(count)}: one is unrolled for several"
            " tokens, several are not supported"
        )
    if values.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            "config.json: `mtp_use_dedicated_embeddings`: an MTP layer with an embedding of its own is not"
            " supported"
        )
    return form if count else None


def _check_counts(values: Mapping[str, Any]) -> None:
    for name in COUNTS:
        value, limit = values.get(name, 1), MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if value is None and name in ("num_key_value_heads", "head_dim"):
            continue
        if not is_integer(value, 1):
            raise CheckpointError(f"config.json: `{name}` must be a positive integer, not {shown(value)}")
        if value > limit:
            raise CheckpointError(
                f"config.json: `{name}` is {shown(value)}, beyond the {limit} that any model has"
            )


def _rotations(
    config: Any, family: Family, slides: tuple[int | None, ...], long_context: bool
) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
    """The rotary embeddings of a model, and for each layer the index of its own; None if it has none."""
    if family.rope_by_kind:
        kinds = [FULL if window is None else SLIDING for window in slides]
        # transformers computes frequencies only for the kinds of layers that occur.
        present = sorted(set(kinds))
        return tuple(rope(config, kind) for kind in present), tuple(map(present.index, kinds))
    rotates = [True] * len(slides)
    if family.unrotated == "listed":
        rotates = [bool(flag) for flag in config.no_rope_layers]
    elif family.unrotated == "full" and config.sliding_window is not None:
        rotates = [window is not None for window in slides]
    one = rope(config, partial=family.partial_rotary, long_context=long_context)
    return (one,), tuple(0 if flag else None for flag in rotates)


def expected_shapes(dims: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of each tensor the model must have, Linear weights as [out, in]."""
    hidden, inner, quirks = dims.hidden_size, dims.intermediate_size, dims.quirks
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    heads = {names.Q: queries, names.K: keys, names.V: keys, names.QKV: queries + 2 * keys}
    heads[names.Q] *= 2 if quirks.output_gate else 1
    attention = {
        **{part: (heads[part], hidden, dims.qkv_bias) for part in quirks.qkv},
        names.O: (hidden, queries, dims.output_bias),
    }
    mlp = {
        **dict.fromkeys(quirks.gate_up, ((2 if quirks.fused else 1) * inner, hidden, dims.mlp_bias)),
        names.DOWN: (hidden, inner, dims.mlp_bias),
    }
    norms = {name: hidden for name in astuple(quirks.norms) if name is not None}
    head_norms: dict[str, int] = {}
    if quirks.head_norms is not None:
        whole = quirks.head_norms.whole
        head_norms |= {quirks.head_norms.q: queries if whole else dims.head_dim}
        head_norms |= {quirks.head_norms.k: keys if whole else dims.head_dim}
    yield names.EMBEDDING, (dims.vocab_size, hidden)
    if dims.mtp:
        yield dims.mtp.fused, (hidden, 2 * hidden)
        for name in (dims.mtp.hidden, dims.mtp.token, dims.mtp.final):
            yield name, (hidden,)
    for i in range(dims.num_layers + bool(dims.mtp)):
        net, prefix = dims.recurrent if dims.is_recurrent(i) else None, dims.prefix(i)
        for part, (rows, columns, bias) in ((attention if net is None else _maps(dims, net)) | mlp).items():
            yield f"{prefix}{part}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{part}.bias", (rows,)
        if net is not None:
            yield names.weight(i, names.CONVOLUTION), (net.mixed, 1, net.kernel)
            yield names.weight(i, names.RECURRENT_NORM), (net.value_dim,)
            for name in (names.DECAY, names.DECAY_BIAS):
                yield f"{names.layer(i)}{name}", (net.value_heads,)
        for name, size in (norms | (head_norms if net is None else {})).items():
            yield f"{prefix}{name}.weight", (size,)
    yield names.FINAL_NORM, (hidden,)
    if not dims.tied:
        yield names.HEAD, (dims.vocab_size, hidden)


def _maps(dims: Dims, net: Recurrent) -> dict[str, tuple[int, int, bool]]:
    """The Linear maps of a recurrent layer: outputs, inputs, and whether it has a bias."""
    values = net.value_heads * net.value_dim
    rows = dict(zip(names.RECURRENT_IN, (net.mixed, values, net.value_heads, net.value_heads), strict=True))
    maps = {part: (count, dims.hidden_size, False) for part, count in rows.items()}
    return maps | {names.RECURRENT_OUT: (dims.hidden_size, values, False)}


def check_shapes(dims: Dims, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError that lists every missing, extra and misshapen tensor."""
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
        raise CheckpointError(f"{len(problems)} tensors do not fit config.json:{listed(problems)}")


def _other_names(shapes: Mapping[str, object]) -> str | None:
    """The error for tensors whose names have another prefix, as AutoModel or a wrapper saves them."""
    first = names.weight(0, names.DOWN)
    inner = first.removeprefix("model.")
    theirs = next((name for name in shapes if name.endswith(inner)), None)
    if theirs is None or first in shapes:
        return None
    prefix = theirs.removesuffix(inner)
    return (
        f"the tensors' names begin with `{prefix}layers.` where `model.layers.` is expected: save the whole"
        " causal model, `AutoModelForCausalLM.from_pretrained(path).save_pretrained(other)`, and export that"
    )
