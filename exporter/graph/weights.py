"""Writes the weights file of a bundle: every tensor in the graph's layout, streamed from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np
import onnx

from ...runtime.errors import PrecisionError
from ...runtime.machine import cores
from ..checkpoint import names
from ..checkpoint.dims import Dims
from ..checkpoint.tensors import Tensors, as_torch, check_finite, chunks, largest
from ..codes import (
    Codec,
    CodeSource,
    Encoded,
    Quantization,
    in_grouped_panels,
    in_panels,
    pack,
    panels_shape,
)

ALIGNMENT = 64  # bytes: a processor's cache line
ONNX_DTYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int4": onnx.TensorProto.INT4,
    "uint4": onnx.TensorProto.UINT4,
}
# Numbers of a weight that are encoded together; temporaries take about 40 bytes for each.
ENCODED_AT_ONCE = 1 << 18
TRANSPOSED_AT_ONCE = 1 << 18  # numbers that are transposed together: they fit in a processor's cache
WORKERS = min(4, cores())
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """How one weight of the graph is made: `sources` are read, transposed if they are Linear weights, and
    joined on the last axis.

    With a codec, `dtype` is the type of the scales, which follow the codes as `{name}_scale`, before
    `{name}_zero_point` if there is one, or are in its panels. `offset` is added to every number. `rows`: the
    rows of the one source that are read; empty: all.
    """

    name: str
    sources: tuple[str, ...]
    transpose: bool
    dtype: str
    codec: Codec | None = None
    in_panels: bool = False
    offset: float = 0.0
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a weight in the weights file; `offset` and `length` are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def initializer(self, location: str) -> onnx.TensorProto:
        """A TensorProto that refers to the weights file by its name `location`."""
        tensor = onnx.TensorProto(name=self.name, data_type=ONNX_DTYPES[self.dtype], dims=self.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": location, "offset": str(self.offset), "length": str(self.length)}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)
        return tensor


def weight_recipes(
    dims: Dims, precision: str, quantization: Quantization | None = None
) -> Iterator[WeightRecipe]:
    """Yield the graph's weights in file order. Norm scales stay fp32; Linear weights become [in, out]."""
    embedding = quantization.table(quantization.embedding) if quantization else None
    panels = quantization is not None and quantization.is_integer
    is_coded = embedding is not None
    yield WeightRecipe("embed_tokens.weight", (names.EMBEDDING,), is_coded, precision, embedding, panels)
    quirks, plus = dims.quirks, dims.quirks.norm_offset
    for i in range(dims.num_layers + bool(dims.mtp)):
        prefix = dims.prefix(i)

        def norm(name: str, part: str | None, i: int = i, prefix: str = prefix) -> Iterator[WeightRecipe]:
            if part is not None:
                source = f"{prefix}{part}.weight"
                yield WeightRecipe(f"layers.{i}.{name}.weight", (source,), False, "float32", offset=plus)

        def linear(
            name: str, parts: Sequence[str], bias: bool, i: int = i, prefix: str = prefix
        ) -> Iterator[WeightRecipe]:
            for joined, sharing in split_by_codec(name, parts, quantization):
                sources = tuple(f"{prefix}{part}.weight" for part in sharing)
                codec = quantization.codec(sources[0]) if quantization else None
                yield WeightRecipe(f"layers.{i}.{joined}.weight", sources, True, precision, codec, panels)
            if bias:
                sources = tuple(f"{prefix}{part}.bias" for part in parts)
                yield WeightRecipe(f"layers.{i}.{name}.bias", sources, False, precision)

        if i == dims.num_layers:
            yield from _mtp(dims, precision, quantization)
        yield from norm("input_norm", quirks.norms.before_attention)
        if dims.is_recurrent(i):
            yield from linear("recurrent_in", names.RECURRENT_IN, bias=False)
            yield from _recurrent(i)
            yield from linear("recurrent_out", (names.RECURRENT_OUT,), bias=False)
        else:
            yield from linear("qkv", quirks.qkv, dims.qkv_bias)
            if quirks.head_norms is not None:
                yield from norm("q_norm", quirks.head_norms.q)
                yield from norm("k_norm", quirks.head_norms.k)
            yield from linear("attention_output", (names.O,), dims.output_bias)
        yield from norm("attended_norm", quirks.norms.after_attention)
        yield from norm("post_norm", quirks.norms.before_mlp)
        yield from linear("gate_up", quirks.gate_up, dims.mlp_bias)
        yield from linear("down", (names.DOWN,), dims.mlp_bias)
        yield from norm("mlp_norm", quirks.norms.after_mlp)
    yield WeightRecipe("norm.weight", (names.FINAL_NORM,), False, "float32", offset=plus)
    if not shares_table(dims, quantization):
        head = quantization.table(quantization.head) if quantization else None
        source = names.EMBEDDING if dims.tied else names.HEAD
        yield WeightRecipe("lm_head.weight", (source,), head is not None, precision, head, panels)


def _mtp(dims: Dims, precision: str, quantization: Quantization | None) -> Iterator[WeightRecipe]:
    """The weights that only an MTP layer has: its input, the norms, and the rows of lm_head for the
    shortlist.
    """
    assert dims.mtp is not None
    form, prefix, plus = dims.mtp, f"layers.{dims.num_layers}.mtp", dims.quirks.norm_offset
    norms = {"hidden_norm": form.hidden, "token_norm": form.token, "final_norm": form.final}
    is_rotated = quantization is not None and quantization.is_integer
    if is_rotated:
        norms |= {"own_scale": f"{names.PLAIN}{form.final}"}
        norms |= {"scale": f"{names.PLAIN}{names.FINAL_NORM}"} if form.reads_normed else {}
    for name, source in norms.items():
        yield WeightRecipe(f"{prefix}_{name}.weight", (source,), False, "float32", offset=plus)
    codec = quantization.codec(form.fused) if quantization else None
    yield WeightRecipe(f"{prefix}_input.weight", (form.fused,), True, precision, codec, is_rotated)
    if dims.shortlist:
        head = quantization.table(quantization.head) if quantization else None
        source = names.EMBEDDING if dims.tied else names.HEAD
        source = names.MTP_HEAD if is_rotated else source
        yield WeightRecipe(
            "mtp_head.weight", (source,), head is not None, precision, head, is_rotated, rows=dims.shortlist
        )


def _recurrent(i: int) -> Iterator[WeightRecipe]:
    """The weights of a recurrent layer, except Linear maps. Its norm is stored as it is in every family."""
    parts = {"convolution": names.CONVOLUTION, "recurrent_norm": names.RECURRENT_NORM}
    sources = {f"{name}.weight": names.weight(i, part) for name, part in parts.items()}
    prefix = names.layer(i)
    sources |= {"decay": f"{prefix}{names.DECAY}", "decay_bias": f"{prefix}{names.DECAY_BIAS}"}
    for name, source in sources.items():
        yield WeightRecipe(f"layers.{i}.{name}", (source,), False, "float32")


def split_by_codec(
    name: str, parts: Sequence[str], quantization: Quantization | None
) -> list[tuple[str, Sequence[str]]]:
    """The maps of the graph, by name, that the map `name` of the checkpoint's `parts` is stored as: one, or
    "qk" and "v" if the values have another codec.
    """
    if quantization is None or len({quantization.codec(part) for part in parts}) == 1:
        return [(name, parts)]
    return [("qk", parts[:-1]), ("v", parts[-1:])]


def shares_table(dims: Dims, quantization: Quantization | None) -> bool:
    """Whether lm_head and the embedding are the same bytes of the weights file.

    Codes then have two names, `embed_tokens.weight` and `lm_head.weight`: ONNX Runtime 1.31 does not fuse
    DequantizeLinear and MatMul if another node reads the same initializer, and would decode the whole table
    in every step.
    """
    return dims.tied and (quantization is None or quantization.head == quantization.embedding)


def write_weights(
    file: BinaryIO,
    tensors: Tensors,
    dims: Dims,
    precision: str,
    quantization: Quantization | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Placed]:
    """Stream every weight to `file`. `progress` is called with the number of bytes after each.

    Memory is about three copies of the largest tensor. Raises CheckpointError for NaN or Inf in the
    checkpoint, and PrecisionError for weights beyond the range of `precision`.
    """
    placed = {}
    for recipe in weight_recipes(dims, precision, quantization):
        try:
            entries = (
                _write(file, recipe, tensors)
                if recipe.codec is None
                else _write_coded(file, recipe, recipe.codec, tensors)
            )
        except OverflowError as error:
            raise PrecisionError(
                f"`{error}` has numbers beyond {precision}'s range of {_limit(NUMPY_DTYPES[precision]):.5g};"
                " export with --precision bf16 or fp32"
            ) from None
        for entry in entries:
            placed[entry.name] = entry
            if progress is not None:
                progress(entry.length)
    if (
        quantization is not None
        and quantization.table(quantization.head) is not None
        and shares_table(dims, quantization)
    ):
        aliases = [
            replace(entry, name=name.replace("embed_tokens", "lm_head"))
            for name, entry in placed.items()
            if "embed_tokens" in name
        ]
        placed |= {alias.name: alias for alias in aliases}
    table = placed["embed_tokens.weight"]
    if len(table.shape) == 4:  # panels, of which single fours are read
        placed[table.name] = replace(table, shape=(table.length // 4, 4))
    return placed


def total_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    dims: Dims,
    precision: str,
    quantization: Quantization | None = None,
) -> int:
    """Bytes of weight data that `write_weights` writes, without padding."""
    return sum(
        _bytes(
            recipe, [(len(recipe.rows) or n, *rest) for n, *rest in map(shapes.__getitem__, recipe.sources)]
        )
        for recipe in weight_recipes(dims, precision, quantization)
    )


def _bytes(recipe: WeightRecipe, shapes: Sequence[tuple[int, ...]]) -> int:
    width = NUMPY_DTYPES[recipe.dtype].itemsize
    if (codec := recipe.codec) is None:
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes) * width
    outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
    if recipe.in_panels:
        return int(np.prod(panels_shape(codec.multiplied, inputs, outputs))) + outputs * width
    groups, bits, count = outputs * codec.num_groups(inputs), codec.bits, outputs * inputs
    return (count * bits + 7) // 8 + groups * width + (0 if codec.symmetric else (groups * bits + 7) // 8)


def _align(file: BinaryIO) -> int:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    return file.tell()


def _read(recipe: WeightRecipe, source: str, tensors: Tensors) -> np.ndarray:
    part = tensors.read(source)
    part = part[list(recipe.rows)] if recipe.rows else part
    most = largest(part)
    if not most <= _limit(NUMPY_DTYPES[recipe.dtype]):
        source = source.removeprefix(names.PLAIN)
        check_finite(source, part)
        raise OverflowError(source)
    return part


def _write(file: BinaryIO, recipe: WeightRecipe, tensors: Tensors) -> list[Placed]:
    offset, dtype = _align(file), NUMPY_DTYPES[recipe.dtype]
    parts = [_read(recipe, source, tensors) for source in recipe.sources]
    if recipe.offset:
        parts = [np.asarray(part, np.float32) + np.float32(recipe.offset) for part in parts]
    if recipe.transpose:
        shape: tuple[int, ...] = (parts[0].shape[1], sum(part.shape[0] for part in parts))
        file.write(_transposed(parts, shape, dtype).view(np.uint8).data)
    else:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        for part in parts:
            for rows in chunks(part):
                file.write(np.ascontiguousarray(rows, dtype).view(np.uint8).data)
    return [Placed(recipe.name, recipe.dtype, shape, offset, file.tell() - offset)]


def _transposed(parts: Sequence[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The parts, transposed and joined on the last axis; by torch, which converts bfloat16 faster."""
    packed = np.empty(shape, dtype)
    target, start = as_torch(packed), 0
    for part in parts:
        source = as_torch(part)

        def place(at: int, rows: np.ndarray, source: Any = source, start: int = start) -> None:
            target[:, start + at : start + at + len(rows)].copy_(source[at : at + len(rows)].T)

        _in_threads(part, TRANSPOSED_AT_ONCE, place)
        start += part.shape[0]
    return packed


def _write_coded(file: BinaryIO, recipe: WeightRecipe, codec: Codec, tensors: Tensors) -> list[Placed]:
    """Write codes [in, out] or in panels, then scales [groups, out] (or [out], one for a channel) and zero
    points that are not in panels.
    """
    sizes = [(len(recipe.rows) or rows, *rest) for rows, *rest in (tensors.shapes[n] for n in recipe.sources)]
    inputs, outputs = sizes[0][1], sum(size[0] for size in sizes)
    groups, dtype, start = codec.num_groups(inputs), NUMPY_DTYPES[recipe.dtype], 0
    order: Literal["F", "C"] = "F" if recipe.in_panels else "C"  # of reading
    codes = np.empty((inputs, outputs), np.int8 if codec.symmetric else np.uint8, order)
    has_one_scale = codec.multiplied or codec.group_size is None  # for a channel
    scales = np.empty((1 if has_one_scale else groups, outputs), dtype)
    zeros, multipliers = np.empty((2, groups, outputs), np.uint8)

    def place(encoded: Encoded, start: int) -> None:
        to = slice(start, start + len(encoded.codes))
        codes[:, to] = encoded.codes.reshape(len(encoded.codes), inputs).T
        scales[:, to] = encoded.scales.T
        if encoded.zeros is not None:
            zeros[:, to] = encoded.zeros.T
        if encoded.multipliers is not None:
            multipliers[:, to] = encoded.multipliers.T

    for source, size in zip(recipe.sources, sizes, strict=True):
        if isinstance(tensors, CodeSource) and tensors.holds(source, codec):
            place(tensors.encoded(source, dtype), start)
        else:

            def encode(at: int, rows: np.ndarray, start: int = start) -> None:
                place(codec.encode(rows, dtype), start + at)

            _in_threads(_read(recipe, source, tensors), ENCODED_AT_ONCE, encode)
        start += size[0]
    scale_dims = (outputs,) if has_one_scale else (groups, outputs)
    arrays: list[tuple[str, str, tuple[int, ...], Any]] = []
    if recipe.in_panels:
        panels = in_grouped_panels(codes, zeros, multipliers) if codec.multiplied else in_panels(codes)
        arrays.append(("", str(panels.dtype), panels.shape, panels.data))
    else:
        arrays.append(("", codec.dtype, (inputs, outputs), pack(codes, codec.dtype)))
    arrays.append(("_scale", recipe.dtype, scale_dims, scales.tobytes()))
    if not (codec.symmetric or recipe.in_panels):
        arrays.append(("_zero_point", codec.dtype, (groups, outputs), pack(zeros, codec.dtype)))
    placed = []
    for suffix, kind, dims, data in arrays:
        offset = _align(file)
        file.write(data)
        placed.append(Placed(recipe.name + suffix, kind, dims, offset, file.tell() - offset))
    return placed


def _in_threads(part: np.ndarray, limit: int, work: Callable[[int, np.ndarray], None]) -> None:
    """Call work(first row, rows) on blocks of about `limit` numbers, in threads: numpy releases the lock."""
    blocks = list(chunks(part, limit))
    with ThreadPoolExecutor(WORKERS) as pool:
        # list() waits for all of them and raises the error of one.
        list(pool.map(work, accumulate((len(rows) for rows in blocks[:-1]), initial=0), blocks))


def _limit(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)
