"""Write a checkpoint as a bundle: weights, graphs, tokenizer, self-check and manifest."""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from ..runtime.bundle.files import MANIFEST_FILE, describe, recover, replacing
from ..runtime.bundle.manifest import (
    Manifest,
    ModelInfo,
    ParityReport,
    RecurrentInfo,
    TextInfo,
    TokenInfo,
    Variant,
)
from ..runtime.bundle.open import open_bundle, write_manifest
from ..runtime.bundle.variant_info import QuantizationInfo, QuantizerInfo
from ..runtime.device.ort.library import LEVELED, check_recurrent
from ..runtime.errors import BundleError, ExportError, MarsWarning
from ..runtime.machine import available
from .checkpoint.dims import Dims
from .checkpoint.open import Checkpoint
from .codes import Quantization
from .export_options import ExportOptions
from .graph import step as graph
from .graph.nodes import fixed
from .graph.spec import GraphSpec
from .graph.weights import Placed, total_bytes, write_weights
from .option_rules import check_options, quantizer_for
from .quantize.text import shortlist
from .turns import derive_chat_turns, find_control_tokens, find_thinking, with_plain_marks

MEMORY_SHARE = 0.75  # of free memory: at most for weights
WEIGHTS_FILE, TOKENIZER_FILE = "weights.bin", "tokenizer.json"

Progress = Callable[[str, int, int], None]
"""Called with the name of a phase, how much of it is done, and its total."""


def export_onnx(
    checkpoint: Checkpoint,
    target: Path,
    options: ExportOptions,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write a bundle for ONNX Runtime to `target` and return its manifest.

    An existing target stays unchanged until the new bundle is complete. Raises ExportError for bad options,
    for an existing target without `force`, if the disk is too full, and if the graph does not agree with the
    checkpoint.
    """
    check_options(options, checkpoint.dims)
    quantizer_for(options, checkpoint)
    if checkpoint.dims.recurrent is not None:
        check_recurrent()
    checkpoint = _with_shortlist(checkpoint, options)
    report = progress or (lambda phase, done, total: None)
    with writing(target, weight_bytes(checkpoint, options), force) as directory, keeping(target) as kept:
        layouts = _cuda_layouts(options, checkpoint.dims)
        manifest = write_bundle(directory, checkpoint, options, report, layouts, kept)
        reopen(directory, target)
        return manifest


def _with_shortlist(checkpoint: Checkpoint, options: ExportOptions) -> Checkpoint:
    """The checkpoint with the tokens that its MTP layer proposes, if it has one. In a rotated model these
    have a table of their own even if they are all tokens: lm_head has the scale of another norm.
    """
    dims = checkpoint.dims
    if not dims.mtp:
        return checkpoint
    ids = shortlist(checkpoint, options.shortlist, options.calibration_text)
    if not ids and options.quantization is not None and options.quantization.is_integer:
        ids = tuple(range(dims.vocab_size))
    return replace(checkpoint, dims=replace(dims, shortlist=ids))


def reopen(directory: Path, target: Path) -> None:
    """Check that the new bundle opens, under the name `target` that it will have."""
    try:
        open_bundle(directory, name=target)
    except BundleError as error:
        problem = str(error).replace(f"{directory}: ", "").replace(f"{directory}/", "")
        raise ExportError(
            f"the new bundle does not open: {problem}; it was removed. Correct the"
            " checkpoint's config.json or tokenizer_config.json, or report it"
        ) from error


def write_bundle(
    directory: Path,
    checkpoint: Checkpoint,
    options: ExportOptions,
    report: Progress,
    more_layouts: Sequence[str],
    kept: Path,
) -> Manifest:
    """Write a bundle to an empty directory, with further graphs of the same weights in `more_layouts`:
    "cuda" is for ONNX Runtime, "appended" for older TensorRT. The options must have been checked. `kept` is
    of `keeping`.
    """
    if checkpoint.trained_block not in (None, options.block):
        warnings.warn(
            f"block {options.block}: the checkpoint was trained with block {checkpoint.trained_block}; leave"
            " --block out to use that",
            MarsWarning,
            stacklevel=3,
        )
    stored, quantizer = checkpoint, None
    chooser = quantizer_for(options, checkpoint)
    if chooser is not None and options.quantization is not None:  # rotated, or codes of a calibration
        stored, quantizer = chooser.prepared(checkpoint, options.quantization, options.block, report, kept)
    placed = _write_weights(directory, stored, options, report)
    (directory / TOKENIZER_FILE).write_text(with_plain_marks(checkpoint.vocabulary), encoding="utf-8")

    def written(name: str, options: ExportOptions) -> tuple[Variant, onnx.ModelProto]:
        mtp_drafts = options.block - 1 if stored.dims.mtp else 0
        spec = GraphSpec(stored.dims, options, stored.vocabulary.mask_token_id, mtp_drafts)
        file = f"{name}.onnx"
        model = graph.build(spec, placed, WEIGHTS_FILE, version("mars-export"))
        onnx.save(model, directory / file)
        onnx.checker.check_model(str(directory / file))
        variant = Variant(
            name,
            "onnx",
            file,
            WEIGHTS_FILE,
            options.weight_precision,
            options.kv_dtype,
            options.kv_layout or "in-place",
            options.outputs,
            # The graph for CUDA has the arithmetic of the one beside it, in other kernels.
            drift=None
            if options.is_cuda
            else _self_check(directory, checkpoint, options, spec, placed, report),
            quantization=_quantization_info(options.quantization, quantizer),
            accuracy_level=options.accuracy_level if options.precision in LEVELED else None,
        )
        return variant, model

    variant, model = written("model", options)
    variants = [variant, *_fixed_variants(directory, model, variant, options, checkpoint.dims.context_length)]
    for layout in more_layouts:
        name = f"{options.precision if layout == 'cuda' else 'model'}-{layout}"
        variants.append(written(name, replace(options, kv_layout=layout, reference=False))[0])
    manifest = _manifest(directory, checkpoint, options.block, variants)
    write_manifest(directory, manifest)
    return manifest


def _cuda_layouts(options: ExportOptions, dims: Dims) -> tuple[str, ...]:
    """The KV layout of the graph for ONNX Runtime on CUDA, if the model and its precision have one."""
    is_integer = options.quantization is not None and options.quantization.is_integer
    has_none = is_integer or dims.mtp or dims.recurrent or options.is_appended or options.dtype == "bfloat16"
    return () if has_none else ("cuda",)


def _fixed_variants(
    directory: Path, model: onnx.ModelProto, variant: Variant, options: ExportOptions, context_length: int
) -> Iterator[Variant]:
    """Write copies of the graph for steps of one token, of a block, and of a part of a prompt."""
    capacity, prefill = options.sizes(context_length)
    for slots in dict.fromkeys((1, options.block, prefill)) if options.fixed else ():
        shape: dict[str, Any] = {"batch": options.batch, "slots": slots, "capacity": capacity}
        name = f"model-b{options.batch}-s{slots}-c{capacity}"
        onnx.save(fixed(model, shape | {"outputs": slots}), directory / f"{name}.onnx")
        onnx.checker.check_model(str(directory / f"{name}.onnx"))
        # Only the dynamic graph is measured; these have the same nodes and weights.
        yield replace(variant, name=name, file=f"{name}.onnx", drift=None, **shape)


def weight_bytes(checkpoint: Checkpoint, options: ExportOptions) -> int:
    """Bytes of the weights that an export with `options` writes."""
    if options.quantization is not None and options.quantization.is_integer:
        from .quantize.rotate import rotated_checkpoint

        checkpoint = rotated_checkpoint(checkpoint)
    return total_bytes(checkpoint.tensors.shapes, checkpoint.dims, options.dtype, options.quantization)


def instead_of_w8a8(checkpoint: Checkpoint, options: ExportOptions) -> tuple[str, str] | None:
    """The precision that --precision auto takes in place of w8a8, and the reason; None if it takes w8a8.

    That is w4a8 where w8a8's weights would leave little of this machine's free memory, and the checkpoint can
    have it.
    """
    size, free = weight_bytes(checkpoint, options), available()
    if free is None or size <= MEMORY_SHARE * free:
        return None
    smaller = replace(options, precision="w4a8")
    try:
        check_options(smaller, checkpoint.dims)
    except ExportError:
        return None
    return "w4a8", f"w8a8's {size / 1e9:.1f} GB are too much for {free / 1e9:.1f} GB of free memory"


def producer() -> str:
    """The name and version of this exporter, for bundles."""
    return f"mars-export {version('mars-export')}"


def _write_weights(
    directory: Path, checkpoint: Checkpoint, options: ExportOptions, report: Progress
) -> dict[str, Placed]:
    done, dims, tensors = 0, checkpoint.dims, checkpoint.tensors
    size = total_bytes(tensors.shapes, dims, options.dtype, options.quantization)

    def written(count: int) -> None:
        nonlocal done
        done += count
        report("weights", done, size)

    with (directory / WEIGHTS_FILE).open("wb") as file:
        return write_weights(file, tensors, dims, options.dtype, options.quantization, written)


def _self_check(
    directory: Path,
    checkpoint: Checkpoint,
    options: ExportOptions,
    spec: GraphSpec,
    placed: dict[str, Placed],
    report: Progress,
) -> ParityReport:
    from .check import selfcheck

    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report("self-check", done, 2 * checkpoint.dims.num_layers)

    spec = replace(spec, mtp_drafts=0)  # they are verified in each step, so an error in them costs speed only
    return selfcheck.check(
        directory,
        graph.build(
            replace(spec, options=replace(options, logits=True)), placed, WEIGHTS_FILE, version("mars-export")
        ),
        checkpoint,
        spec,
        options.accuracy_level,
        bounded=not options.allow_drift,
        with_reference_library=options.reference,
        progress=advance,
    )


def _quantization_info(
    storage: Quantization | None, quantizer: QuantizerInfo | None
) -> QuantizationInfo | None:
    if storage is None:
        return None
    linear = storage.linear
    return QuantizationInfo(
        linear.group_size, linear.symmetric, storage.head, storage.embedding, quantizer, linear.bits
    )


def _manifest(directory: Path, checkpoint: Checkpoint, block: int, variants: Sequence[Variant]) -> Manifest:
    vocabulary, dims = checkpoint.vocabulary, checkpoint.dims
    turns = derive_chat_turns(vocabulary)
    return Manifest(
        producer=producer(),
        source=checkpoint.source,
        revision=checkpoint.revision,
        model=ModelInfo(
            *(dims.model_type, dims.vocab_size, dims.hidden_size, dims.num_layers, dims.num_heads),
            *(dims.num_kv_heads, dims.head_dim, dims.context_length, block - 1 if dims.mtp else 0),
            recurrent=_recurrent_info(dims),
            mtp_shortlist=len(dims.shortlist),
        ),
        block=block,
        tokens=TokenInfo(vocabulary.mask_token_id, vocabulary.eos_token_ids, vocabulary.pad_token_id),
        text=TextInfo(
            TOKENIZER_FILE,
            vocabulary.chat_template,
            vocabulary.bos_token,
            vocabulary.eos_token,
            turns,
            find_thinking(vocabulary, turns),
            vocabulary.tool_template,
            vocabulary.special_tokens,
            find_control_tokens(vocabulary, turns),
        ),
        variants=tuple(variants),
        files=tuple(describe(path) for path in sorted(directory.iterdir())),
        masks=checkpoint.masks,
    )


def _recurrent_info(dims: Dims) -> RecurrentInfo | None:
    net = dims.recurrent
    if net is None:
        return None
    return RecurrentInfo(
        net.layers, net.value_heads, net.key_dim, net.value_dim, inputs=net.entry, width=net.kernel - 1
    )


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SPARE = 64 << 20


@contextmanager
def writing(target: Path, size: int, force: bool) -> Iterator[Path]:
    """A directory that becomes `target` on success and is removed on any error.

    Raises ExportError if the target exists, if its parent cannot be written to, or if the disk is too full.
    """
    recover(target)
    _check(target, force)
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(replacing(target))
            free = shutil.disk_usage(scratch).free
        except OSError as error:
            raise ExportError(
                f"{target.parent}: cannot be written to ({error.strerror}); choose another directory with -o"
            ) from error
        if free < size + SPARE:
            raise ExportError(
                f"{target.parent}: {(size + SPARE) / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free"
            )
        try:
            yield scratch
            _check(target, force)
            stack.close()
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise ExportError(
                f"{target}: {error.strerror}; free some space and export again. An earlier"
                " bundle is unchanged"
            ) from error


def kept_codes(target: Path) -> Path:
    """The directory `.NAME.codes` beside `target`, in which calibrated codes wait for the next export."""
    return target.with_name(f".{target.name}.codes")


@contextmanager
def keeping(target: Path) -> Iterator[Path]:
    """The directory of calibrated codes. It stays only if Ctrl-C, SIGTERM or the end of the process
    interrupts the block. The next export to `target` continues with the codes that fit.
    """
    kept, is_interrupted = kept_codes(target), False
    try:
        yield kept
    except (KeyboardInterrupt, SystemExit):
        is_interrupted = True
        raise
    finally:
        if not is_interrupted:
            shutil.rmtree(kept, ignore_errors=True)


def _check(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise ExportError(f"{target} exists; give --force to replace it")
    if not (target / MANIFEST_FILE).is_file():
        raise ExportError(f"{target} exists and is not a bundle; --force only replaces bundles")
