"""Which variant of a bundle runs on this machine, and why each other does not. Knows what is here, opens
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..bundle.engine_info import this_platform
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..errors import SessionError
from .name import DeviceName
from .ort.backend import KV_DTYPES, NO_KERNELS


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, with one GPU of it. `gpu` such as `sm86`, with `gpu_name` and the CUDA version of its
    `driver`; or `no_gpu` says why there is none.

    `tensorrt`: backend -> version of what is installed. `platform` such as `linux-x86_64`.
    """

    platform: str
    tensorrt: dict[str, str]
    gpu: str = ""
    gpu_name: str = ""
    driver: str = ""
    no_gpu: str = ""


def look_around(gpu: int = 0) -> Here:
    """Ask the machine about the GPU of that number. Loads TensorRT and CUDA libraries where they are."""
    from .trt.cuda import find_gpu
    from .trt.engine import EXTRAS, installed_version

    versions = {backend: v for backend in EXTRAS if (v := installed_version(backend)) is not None}
    system = this_platform()
    found = find_gpu(gpu)
    if isinstance(found, str):
        return Here(system, versions, no_gpu=found)
    return Here(system, versions, found.capability, found.name, found.driver)


def why_not(variant: Variant, device: str, here: Here | None) -> str | None:
    """Why `variant` does not run on `device` here; None if nothing is against it. Engines need `here`."""
    if not variant.is_engine:
        if variant.is_fixed:
            return "its fixed shapes are for compilers; the session runs the dynamic graph"
        return None if variant.kv_dtype in KV_DTYPES else NO_KERNELS
    if DeviceName.of(device).kind != "cuda":
        return f"made for {variant.backend}: an engine runs on a GPU; give --device cuda"
    assert here is not None
    return "; ".join(_engine_obstacles(variant, here)) or None


def is_same_version(one: str, other: str) -> bool:
    """Whether two versions agree in what both say: Python's TensorRT is 10.3.0 where the library says
    10.3.0.30.
    """
    return all(a == b for a, b in zip(one.split("."), other.split("."), strict=False))


def _engine_obstacles(variant: Variant, here: Here) -> list[str]:
    from .trt.engine import install

    info = variant.engine
    if info is None or variant.capacity is None:
        return ["the manifest does not say what it was built for; build it again with `mars-export trt`"]
    reasons = []
    if info.platform != here.platform:
        reasons.append(f"built on {info.platform}, this is {here.platform}; build it here")
    installed = here.tensorrt.get(variant.backend)
    if installed is None:
        reasons.append(f"{variant.backend} {info.version} is not installed; {install(variant.backend)}")
    elif not is_same_version(installed, info.version):
        reasons.append(
            f"built with {variant.backend} {info.version}, {installed} is installed; build it again or"
            f" install"
            f" {info.version}"
        )
    if here.no_gpu:
        return [*reasons, here.no_gpu]
    if here.gpu not in info.compute_capabilities:
        reasons.append(
            f"built for {', '.join(info.compute_capabilities)}, this GPU is a {here.gpu_name} ({here.gpu});"
            f" build it"
            " with --target host"
        )
    if info.cuda.isdecimal() and here.driver and int(here.driver.split(".")[0]) < int(info.cuda):
        reasons.append(
            f"its libraries are for CUDA {info.cuda}, this driver supports CUDA {here.driver}; update the"
            f" driver"
        )
    return reasons


def choose(bundle: Bundle, device: str, here: Here | None = None) -> Variant:
    """The variant to open on `device`: an engine before a graph on a GPU, in the manifest's order.

    Raises SessionError with the reason for each. A bundle with engines of which none fits is an error, not a
    slower graph.
    """
    name, variants = DeviceName.of(device), bundle.manifest.variants
    candidates = [v for v in variants if v.is_engine] if name.kind == "cuda" else []
    candidates = candidates or [v for v in variants if not v.is_engine]
    if here is None and any(v.is_engine for v in candidates):
        here = look_around(name.ordinal)
    reasons = {v.name: why_not(v, device, here) for v in candidates}
    for variant in candidates:
        if reasons[variant.name] is None:
            return variant
    reasons |= {v.name: _other(v, device) for v in variants if v not in candidates}
    lines = [f"{variant}: {reason}" for variant, reason in reasons.items()]
    raise SessionError(f"{bundle.path}: no variant runs here on {device}:\n  " + "\n  ".join(lines))


def _other(variant: Variant, device: str) -> str:
    words = f"a graph for ONNX Runtime; give --variant {variant.name} to run it instead of an engine"
    return why_not(variant, device, None) or words
