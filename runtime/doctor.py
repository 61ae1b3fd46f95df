"""What works on this machine: packages, devices, and whether a bundle opens.

Findings are values; nothing is printed here.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from .bundle.manifest import Variant
from .bundle.open import Bundle, open_bundle
from .decode.config import GenerationConfig
from .device.name import DeviceName
from .device.ort import PROVIDERS, version_and_devices
from .device.variants import Here, choose, look_around, why_not
from .errors import MarsError
from .session import Session

# package -> what it is for and the extra that installs it
OPTIONAL = {
    "torch": ("export", "exporting"),
    "transformers": ("export", "exporting checkpoints without tokenizer.json"),
    "onnx": ("export", "exporting"),
    "ml_dtypes": ("export", "exporting"),
    "safetensors": ("export", "exporting"),
    "huggingface_hub": ("export", "downloading checkpoints"),
    "matplotlib": ("calibrate", "calibrating tau and measuring speed"),
    "cuda-bindings": ("rtx", "running TensorRT engines"),
}
TENSORRT = {
    "tensorrt": ("trt", "TensorRT engines on Jetson and data-centre GPUs"),
    "tensorrt_rtx": ("rtx", "TensorRT engines on desktop RTX"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `absent` is fine unless you need it; `bad` is not."""

    subject: str
    state: Literal["good", "absent", "bad"]
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        return all(f.state != "bad" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"good": self.is_good, "findings": [asdict(f) for f in self.findings]}


def examine(bundle: Path | None = None, device: str = "cpu", *, safe: bool = True) -> Report:
    """Look at the installation and, if given, at `bundle` on `device`: every variant, and a real decoding
    step. `safe`: the bundle may be anybody's.
    """
    here = look_around(DeviceName.of(device).ordinal)
    findings = [
        Finding("python", "good", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}"),
        _package("mars-export", None),
        _onnxruntime(),
        *(_device(name) for name in PROVIDERS),
        *(_package(name, hint) for name, hint in OPTIONAL.items()),
        *(_tensorrt(name, hint, here) for name, hint in TENSORRT.items()),
        _gpu(here),
    ]
    if bundle is not None:
        findings += _bundle(bundle, device, here, safe=safe)
    return Report(tuple(findings))


def _package(name: str, hint: tuple[str, str] | None) -> Finding:
    try:
        return Finding(name, "good", version(name))
    except PackageNotFoundError:
        extra, purpose = hint or ("export", "everything")
        return Finding(name, "absent", f"not installed; for {purpose}: pip install 'mars-export[{extra}]'")


def _tensorrt(name: str, hint: tuple[str, str], here: Here) -> Finding:
    if name in here.tensorrt:
        return Finding(name, "good", here.tensorrt[name])
    extra, purpose = hint
    return Finding(name, "absent", f"not installed; for {purpose}: pip install 'mars-export[{extra}]'")


def _gpu(here: Here) -> Finding:
    if here.no_gpu:
        return Finding("gpu", "absent", here.no_gpu)
    return Finding("gpu", "good", f"{here.gpu_name} ({here.gpu}), driver for CUDA {here.driver}")


def _onnxruntime() -> Finding:
    found = version_and_devices()
    if found is None:
        return Finding(
            "onnxruntime",
            "absent",
            "not installed; to run bundles: pip install 'mars-export[cpu]' or 'mars-export[gpu]'",
        )
    return Finding("onnxruntime", "good", found[0])


def _device(name: str) -> Finding:
    found = version_and_devices()
    if found is not None and name in found[1]:
        return Finding(f"device {name}", "good", f"{PROVIDERS[name]} is available")
    return Finding(f"device {name}", "absent", f"the installed onnxruntime has no {PROVIDERS[name]}")


def _bundle(path: Path, device: str, here: Here, *, safe: bool) -> list[Finding]:
    try:
        bundle = open_bundle(path, full=True, safe=safe)
    except MarsError as error:
        return [Finding(str(path), "bad", str(error))]
    size = sum(f.size for f in bundle.manifest.files) / 1e6
    findings = [
        Finding(
            str(path),
            "good",
            f"format {bundle.manifest.format_version}, {len(bundle.manifest.files)} files, {size:.0f} MB,"
            " all hashes match",
        )
    ]
    opened = False
    for variant in bundle.manifest.variants:
        finding = _variant(bundle, variant, device, here, safe=safe)
        opened = opened or finding.state == "good"
        findings.append(finding)
    if any(v.is_engine for v in bundle.manifest.variants):
        findings.append(_choice(bundle, here))
    if not opened:
        findings.append(Finding(str(path), "bad", f"no variant runs on {device} here"))
    return findings


def _variant(bundle: Bundle, variant: Variant, device: str, here: Here, *, safe: bool) -> Finding:
    subject = f"variant {variant.name}"
    # An engine is judged for the GPU it is made for, whatever device was asked for.
    reason = why_not(variant, "cuda" if variant.is_engine else device, here)
    if reason is not None:
        return Finding(subject, "absent", reason)
    if variant.is_engine and DeviceName.of(device).kind != "cuda":
        return Finding(subject, "absent", "fits this machine; it is tried with --device cuda")
    try:
        session = Session.open(bundle.path, device, variant=variant.name, cache_bytes=0, safe=safe)
        done = session.generate(
            [bundle.manifest.tokens.pad],
            GenerationConfig(max_new_tokens=4, tau=0.0, window=bundle.manifest.block),
        )
    except MarsError as error:
        return Finding(subject, "absent", str(error))
    detail = f"opens on {device} and decodes ({done.stats.forwards} step(s))"
    if on_cpu := getattr(session.backend, "on_cpu", {}):
        detail += f"; left to the CPU: {', '.join(f'{count} {name}' for name, count in on_cpu.items())}"
    return Finding(subject, "good", detail)


def _choice(bundle: Bundle, here: Here) -> Finding:
    try:
        return Finding("engine", "good", f"--device cuda takes {choose(bundle, 'cuda', here).name}")
    except MarsError:
        return Finding("engine", "absent", "none of this bundle's engines runs here; the reasons stand above")
