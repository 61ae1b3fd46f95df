"""The variant of a bundle that runs on this machine, its backend, and why the other variants do not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .. import machine
from ..bundle.manifest import Variant
from ..bundle.open import SAFE_REMEDY, Bundle
from ..bundle.variant_info import PORTABLE, this_platform
from ..decode.backend import Backend
from ..errors import SessionError, listed
from .name import DeviceName, GpuOptions
from .ort.backend import OrtBackend
from .ort.library import version_and_devices

# Since this version causal attention over `nonpad_kv_seqlen` entries is aligned to a row's last entry.
CUDA_OLDEST = (1, 28)
NO_KERNELS = (
    "ONNX Runtime has no bfloat16 kernels; this graph is for TensorRT (`mars-export trt`), or export with"
    " --precision fp16 or fp32"
)


@dataclass(frozen=True, slots=True)
class Host:
    """This machine with one of its GPUs.

    `platform` such as `linux-x86_64`. `tensorrt`: backend -> installed version. `gpu` such as `sm86`, with
    `gpu_name` and the CUDA version of its `driver`; `no_gpu`: why there is none.
    """

    platform: str
    tensorrt: dict[str, str]
    gpu: str = ""
    gpu_name: str = ""
    driver: str = ""
    no_gpu: str = ""


def inspect_host(gpu: int = 0) -> Host:
    """This machine with the GPU of that number. Loads TensorRT and CUDA libraries if they are installed."""
    from .cuda import find_gpu
    from .trt.engine import EXTRAS, installed_version

    versions = {backend: v for backend in EXTRAS if (v := installed_version(backend)) is not None}
    system = this_platform()
    device = find_gpu(gpu)
    if isinstance(device, str):
        return Host(system, versions, no_gpu=device)
    return Host(system, versions, device.capability, device.name, device.driver)


def pick(
    bundle: Bundle, device: str, variant: str | None, accuracy_level: int | None = None, *, safe: bool = False
) -> Variant:
    """The variant that runs on `device`, by name or the one that fits, with the accuracy level that it runs
    at: profiles are checked against it.

    `safe` refuses engines, and bundles larger than the available memory. Raises SessionError if no variant
    runs here.
    """
    name = DeviceName.parse(device)
    if bundle.manifest.model.recurrent is not None and name.kind != "cpu":
        raise SessionError(
            f"{bundle.path}: the model's recurrent layers run on a CPU only; give --device cpu",
            code="unsupported_by_model",
        )
    choice = bundle.variant(variant) if variant is not None else choose(bundle, device)
    if safe:
        _check_safe(bundle, choice)
    host = inspect_host(name.ordinal) if choice.is_engine and name.kind == "cuda" else None
    if (reason := why_not(choice, device, host)) is not None:
        raise SessionError(f"{bundle.path}: variant {choice.name} does not run in this session: {reason}")
    if choice.is_engine and accuracy_level is not None:
        what = f"variant {choice.name} is an engine: an accuracy level is for ONNX Runtime"
        raise SessionError(what, field="accuracy_level")
    return choice if accuracy_level is None else replace(choice, accuracy_level=accuracy_level)


def load(
    bundle: Bundle,
    variant: Variant,
    device: str,
    threads: int | None,
    options: Mapping[str, str] | None,
    gpu: GpuOptions,
) -> Backend:
    """The backend of a picked variant. `options` are ONNX Runtime's own. Raises SessionError."""
    name = DeviceName.parse(device)
    if variant.is_engine:
        if options:
            raise SessionError(f"variant {variant.name} is an engine: options are for ONNX Runtime")
        from .trt.backend import TrtBackend

        return TrtBackend.open(bundle, variant, name.ordinal, gpu.stream, gpu.priority)
    if name.kind == "cpu":
        return OrtBackend(bundle, variant, threads, options)
    from .ort.cuda_backend import CudaBackend

    return CudaBackend(bundle, variant, name, options, gpu)


def _check_safe(bundle: Bundle, variant: Variant) -> None:
    if variant.is_engine:
        raise SessionError(
            f"{bundle.path}: variant {variant.name} is a TensorRT engine, which can run any code:"
            f" safe mode runs ONNX graphs only; {SAFE_REMEDY}"
        )
    sizes, free = sum(entry.size for entry in bundle.manifest.files), machine.available()
    if free is not None and sizes > free:
        raise SessionError(
            f"{bundle.path}: its files have {sizes / 1e6:.0f} MB, {free / 1e6:.0f} MB of memory are free:"
            f" safe mode takes no more; {SAFE_REMEDY}"
        )


def choose(bundle: Bundle, device: str, host: Host | None = None) -> Variant:
    """The variant to open on `device`: on a GPU an engine before a graph, and a graph for CUDA before others;
    in the manifest's order.

    Raises SessionError with the reason for each variant. If a bundle has engines and none fits, that is an
    error, and no slower graph is opened.
    """
    name, variants = DeviceName.parse(device), bundle.manifest.variants
    is_cuda = name.kind == "cuda"
    candidates = [v for v in variants if v.is_engine] if is_cuda else []
    graphs = (v for v in variants if not v.is_engine and (is_cuda or v.kv_layout != "cuda"))
    candidates = candidates or sorted(graphs, key=lambda v: v.kv_layout != "cuda")
    if host is None and any(v.is_engine for v in candidates):
        host = inspect_host(name.ordinal)
    reasons = {v.name: why_not(v, device, host) for v in candidates}
    for variant in candidates:
        if reasons[variant.name] is None:
            return variant
    for v in variants:
        if v not in candidates:
            words = f"a graph for ONNX Runtime; give --variant {v.name} to run it all the same"
            reasons[v.name] = why_not(v, device, None) or words
    lines = listed([f"{variant}: {reason}" for variant, reason in reasons.items()])
    raise SessionError(f"{bundle.path}: no variant runs here on {device}:{lines}")


def why_not(variant: Variant, device: str, host: Host | None) -> str | None:
    """Why `variant` does not run on `device` here; None if it does. Engines need `host`."""
    if not variant.is_engine:
        if variant.is_fixed:
            return "its fixed shapes are for compilers; the session runs the dynamic graph"
        if variant.kv_dtype == "int8" and DeviceName.parse(device).kind != "cpu":
            return "its int8 KV entries are for CPUs; export with --kv float"
        if variant.kv_layout == "appended" and DeviceName.parse(device).kind != "cpu":
            return "its KV layout is for TensorRT; export with --kv-layout in-place"
        version = installed[0] if (installed := version_and_devices()) else "1.28"
        if variant.kv_layout == "cuda" and tuple(map(int, version.split(".")[:2])) < CUDA_OLDEST:
            return f"its attention needs ONNX Runtime 1.28 or newer, {version} is installed"
        return NO_KERNELS if variant.kv_dtype == "bfloat16" else None
    if DeviceName.parse(device).kind != "cuda":
        return f"made for {variant.backend}: an engine runs on a GPU; give --device cuda"
    assert host is not None
    return "; ".join(_engine_mismatches(variant, host)) or None


def _engine_mismatches(variant: Variant, host: Host) -> list[str]:
    from .trt.engine import install

    info = variant.engine
    if info is None or variant.capacity is None:
        return ["the manifest does not say what it was built for; build it again with `mars-export trt`"]
    reasons = []
    if info.platform != host.platform:
        reasons.append(f"built on {info.platform}, this is {host.platform}; build it here")
    version = host.tensorrt.get(variant.backend)
    if version is None:
        reasons.append(f"{variant.backend} {info.version} is not installed; {install(variant.backend)}")
    elif not is_same_version(version, info.version):
        reasons.append(
            f"built with {variant.backend} {info.version}, {version} is installed; build it again or"
            f" install {info.version}"
        )
    if host.no_gpu:
        return [*reasons, host.no_gpu]
    if not {host.gpu, PORTABLE} & set(info.compute_capabilities):
        reasons.append(
            f"built for {', '.join(info.compute_capabilities)}, this GPU is a {host.gpu_name} ({host.gpu});"
            " build it with --target host"
        )
    if info.cuda.isdecimal() and host.driver and int(host.driver.split(".")[0]) < int(info.cuda):
        reasons.append(
            f"its libraries are for CUDA {info.cuda}, this driver supports CUDA {host.driver};"
            " update the driver"
        )
    return reasons


def is_same_version(one: str, other: str) -> bool:
    """Whether two versions agree in the parts that both have: Python's TensorRT is 10.3.0, the library
    10.3.0.30.
    """
    return all(a == b for a, b in zip(one.split("."), other.split("."), strict=False))
