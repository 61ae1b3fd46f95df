"""From a bundle to the variant of it that runs here. Knows no prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .. import machine
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..bundle.safe import REMEDY
from ..decode.backend import Backend
from ..device.name import DeviceName, OnGpu
from ..errors import SessionError


def load(
    bundle: Bundle,
    device: str,
    threads: int | None,
    variant: str | None,
    accuracy_level: int | None,
    *,
    safe: bool = False,
    options: Mapping[str, str] | None = None,
    on_gpu: OnGpu | None = None,
) -> tuple[Variant, Backend]:
    """The variant that runs on `device`, by name or the one that fits, and its backend.

    `safe` refuses engines, and files that the memory does not hold. `options` are ONNX Runtime's own. Raises
    SessionError when none runs here.
    """
    from ..device.variants import choose, look_around, why_not

    name = DeviceName.of(device)
    chosen = bundle.variant(variant) if variant is not None else choose(bundle, device)
    if safe:
        _check_safe(bundle, chosen)
    reason = why_not(
        chosen, device, look_around(name.ordinal) if chosen.is_engine and name.kind == "cuda" else None
    )
    if reason is not None:
        raise SessionError(f"{bundle.path}: variant {chosen.name} does not run in this session: {reason}")
    backend = _backend(bundle, chosen, device, threads, accuracy_level, options, on_gpu or OnGpu())
    # What runs is what a profile is held against, so the level that was asked for becomes the variant's.
    return (chosen if accuracy_level is None else replace(chosen, accuracy_level=accuracy_level)), backend


def _check_safe(bundle: Bundle, variant: Variant) -> None:
    if variant.is_engine:
        raise SessionError(
            f"{bundle.path}: variant {variant.name} is a TensorRT engine, which is machine code in"
            f" effect: safe mode runs ONNX graphs only; {REMEDY}"
        )
    sizes, free = sum(entry.size for entry in bundle.manifest.files), machine.available()
    if free is not None and sizes > free:
        raise SessionError(
            f"{bundle.path}: its files have {sizes / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free:"
            f" safe mode takes no more; {REMEDY}"
        )


def _backend(
    bundle: Bundle,
    variant: Variant,
    device: str,
    threads: int | None,
    accuracy_level: int | None,
    options: Mapping[str, str] | None,
    on_gpu: OnGpu,
) -> Backend:
    if variant.is_engine:
        if accuracy_level is not None:
            raise SessionError(f"variant {variant.name} is an engine: an accuracy level is for ONNX Runtime")
        if options:
            raise SessionError(f"variant {variant.name} is an engine: options are for ONNX Runtime")
        from ..device.trt.backend import TrtBackend

        return TrtBackend.of(bundle, variant, DeviceName.of(device).ordinal, on_gpu.stream, on_gpu.priority)
    from ..device.ort.backend import OrtBackend

    return OrtBackend.of(bundle, variant, device, threads, accuracy_level, options, on_gpu)
