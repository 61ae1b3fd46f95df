"""Checks of this machine: packages, devices, and whether a bundle opens and computes the right tokens."""

from __future__ import annotations

import operator
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Literal

from ..bundle.manifest import Variant
from ..bundle.open import Bundle, open_bundle
from ..decode.config import GenerationConfig
from ..device.name import DeviceName
from ..device.ort import kernels
from ..device.ort.library import LEVELED, PROVIDERS, REPLACE, version_and_devices
from ..device.variants import Host, choose, inspect_host, why_not
from ..errors import MarsError, SessionError
from ..machine import byte_products, processor
from ..session.session import Session

ANSWER = 32  # tokens of an answer that is compared
LENGTHS = (5, 90, 17, 41, 230, 64, 9, 128)  # tokens of the prompts
GRAPH = "model"  # the variant that every bundle has
# package -> what it is for and the extra that installs it
OPTIONAL = {
    "torch": ("export", "exporting"),
    "transformers": ("export", "exporting checkpoints without tokenizer.json"),
    "onnx": ("export", "exporting"),
    "ml_dtypes": ("export", "exporting"),
    "safetensors": ("export", "exporting"),
    "huggingface_hub": ("export", "downloading checkpoints"),
}
TENSORRT = {
    "tensorrt": ("trt", "TensorRT engines on Jetson and data-center GPUs"),
    "tensorrt_rtx": ("rtx", "TensorRT engines on desktop RTX"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `absent` is a problem only if you need the subject; `bad` always is."""

    subject: str
    state: Literal["good", "absent", "bad"]
    detail: str


def examine(bundle: Path | None = None, device: str = "cpu", *, safe: bool = True) -> list[Finding]:
    """Check the installation, and `bundle` on `device` if there is one: each variant opens and decodes; on a
    GPU also its tokens and its step times. `safe` opens the bundle in safe mode.
    """
    host = inspect_host(DeviceName.parse(device).ordinal)
    bindings = _version("cuda-bindings") or _version("cuda-python")  # CUDA 12.6 has only the second
    findings = [
        Finding("python", "good", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}"),
        Finding("cpu", "good", f"{processor() or 'unknown'}, byte products: {byte_products()}"),
        _package("mars-export", _version("mars-export"), "export", "everything"),
        _onnxruntime(),
        _kernels(),
        _libmars(),
        *(_device(name) for name in PROVIDERS),
        *(_package(name, _version(name), *hint) for name, hint in OPTIONAL.items()),
        _package("cuda-bindings", bindings, "rtx", "running TensorRT engines"),
        *(_package(name, host.tensorrt.get(name), *hint) for name, hint in TENSORRT.items()),
        _gpu(host),
    ]
    if bundle is not None:
        findings += _bundle(bundle, device, host, safe=safe)
    return findings


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package(name: str, installed: str | None, extra: str, purpose: str) -> Finding:
    if installed is not None:
        return Finding(name, "good", installed)
    return Finding(name, "absent", f"not installed; for {purpose}: pip install 'mars-export[{extra}]'")


def _gpu(host: Host) -> Finding:
    if host.no_gpu:
        return Finding("gpu", "absent", host.no_gpu)
    return Finding("gpu", "good", f"{host.gpu_name} ({host.gpu}), driver for CUDA {host.driver}")


def _onnxruntime() -> Finding:
    installed = version_and_devices()
    if installed is None:
        return Finding(
            "onnxruntime",
            "absent",
            "not installed; to run bundles: pip install 'mars-export[cpu]' or 'mars-export[gpu]'",
        )
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)]
    if len(both) < 2:
        return Finding("onnxruntime", "good", installed[0])
    has_cuda = "cuda" in installed[1]
    return Finding(
        "onnxruntime",
        "good" if has_cuda else "bad",
        f"{installed[0]} {'with' if has_cuda else 'without'} CUDA; {' and '.join(both)} are installed and"
        f" have the same files. If CUDA is missing: {REPLACE}",
    )


def _kernels() -> Finding:
    try:
        package = kernels.installed()
    except SessionError as error:
        return Finding("mars-export-kernels", "bad", str(error))
    if package is not None:
        return Finding("mars-export-kernels", "good", f"{package.version}, with {package.instructions}")
    return Finding(
        "mars-export-kernels",
        "absent",
        f"{kernels.absence()}; it makes w8a8 and w4a8 steps on a CPU faster",
    )


def _libmars() -> Finding:
    """The package mars-export-cpp, and the ONNX Runtime that its library loads."""
    if find_spec("mars_export_cpp") is None:
        return Finding(
            "mars-export-cpp", "absent", "not installed; for C++ and mars-run: pip install mars-export-cpp"
        )
    command = [sys.executable, "-c", "import mars_export_cpp; mars_export_cpp.main()", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
    return Finding("mars-export-cpp", "good" if done.returncode == 0 else "bad", "; ".join(lines))


def _device(name: str) -> Finding:
    installed = version_and_devices()
    if installed is not None and name in installed[1]:
        return Finding(f"device {name}", "good", f"{PROVIDERS[name][0]} is available")
    return Finding(f"device {name}", "absent", f"the installed onnxruntime has no {PROVIDERS[name][0]}")


def _bundle(path: Path, device: str, host: Host, *, safe: bool) -> list[Finding]:
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
        results = _variant(bundle, variant, device, host, safe=safe)
        opened = opened or results[0].state == "good"
        findings += results
    if any(v.is_engine for v in bundle.manifest.variants):
        findings.append(_choice(bundle, host))
    if not opened:
        findings.append(Finding(str(path), "bad", f"no variant runs on {device} here"))
    return findings


def _variant(bundle: Bundle, variant: Variant, device: str, host: Host, *, safe: bool) -> list[Finding]:
    subject = f"variant {variant.name}"
    # An engine is checked against the GPU, whatever the device is.
    reason = why_not(variant, "cuda" if variant.is_engine else device, host)
    if reason is not None:
        return [Finding(subject, "absent", reason)]
    if variant.is_engine and DeviceName.parse(device).kind != "cuda":
        return [Finding(subject, "absent", "fits this machine; check it with --device cuda")]
    try:
        session = Session.open(bundle.path, device, variant=variant.name, cache_bytes=0, safe=safe)
        manifest = bundle.manifest
        tau = 1.0 if manifest.tokens.mask is None else 0.0
        config = GenerationConfig(max_new_tokens=4, tau=tau, masks=manifest.block)
        completion = session.generate([manifest.tokens.pad], config)
    except MarsError as error:
        return [Finding(subject, "absent", str(error))]
    detail = f"opens on {device} and decodes ({completion.stats.forwards} step(s))"
    if on_cpu := getattr(session.backend, "on_cpu", {}):
        detail += f"; left to the CPU: {', '.join(f'{count} {name}' for name, count in on_cpu.items())}"
    findings = [Finding(subject, "good", detail)]
    if DeviceName.parse(device).kind != "cpu":
        try:
            findings += proof(session, _reference(bundle, safe=safe), subject)
        except MarsError as error:
            findings.append(Finding(subject, "bad", str(error)))
    return findings


def _reference(bundle: Bundle, *, safe: bool) -> Session | None:
    """The bundle's graph on the CPU, or None if it does not run here. Activations are not rounded, because
    they are not on a GPU.
    """
    rounds = any(v.name == GRAPH and v.precision in LEVELED for v in bundle.manifest.variants)
    level = 0 if rounds else None
    try:
        return Session.open(bundle.path, variant=GRAPH, accuracy_level=level, cache_bytes=0, safe=safe)
    except MarsError:
        return None


def proof(session: Session, reference: Session | None, subject: str) -> list[Finding]:
    """Check that tokens of `session` are those of `reference`, and that exact mode gives the tokens of one
    token a step; and say what steps took.
    """
    prompts = _prompts(session)
    exact = GenerationConfig(max_new_tokens=ANSWER)
    one_token = exact.with_values(tau=1.0)
    plain = [session.generate(p, one_token).token_ids for p in prompts]
    fast = [session.generate(p, exact).token_ids for p in prompts]
    block = session.bundle.manifest.block
    steps = ", ".join(f"{slots}: {1000 * session.cost.of(slots):.2f}" for slots in (1, block, 2 * block))
    if reference is None:
        tokens = Finding(f"{subject}, tokens", "absent", "the graph does not run on the CPU")
    else:
        expected = [reference.generate(p, one_token).token_ids for p in prompts]
        tokens = _agreement(f"{subject}, tokens", session, plain, expected, "as on the CPU")
    return [
        tokens,
        _agreement(f"{subject}, exact", session, fast, plain, "as one token at a time"),
        Finding(f"{subject}, steps", "good", f"ms by slots, {steps}"),
    ]


def _prompts(session: Session) -> list[list[int]]:
    """Seeded token ids of several lengths."""
    draw, manifest = Random(1), session.bundle.manifest
    mask = manifest.tokens.mask
    high = manifest.model.vocab_size if mask is None else mask
    room = session.backend.max_capacity - ANSWER - 2 * manifest.block
    return [[draw.randrange(high) for _ in range(max(1, min(length, room)))] for length in LENGTHS]


def _agreement(
    subject: str, session: Session, ours: Sequence[object], theirs: Sequence[object], words: str
) -> Finding:
    equal, count = sum(map(operator.eq, ours, theirs)), len(ours)
    # In half precision and with integer codes, the size of a step breaks ties.
    needed = count if session.variant.precision == "float32" else count // 2
    return Finding(subject, "good" if equal >= needed else "bad", f"{equal} of {count} answers {words}")


def _choice(bundle: Bundle, host: Host) -> Finding:
    try:
        return Finding("engine", "good", f"--device cuda uses {choose(bundle, 'cuda', host).name}")
    except MarsError:
        return Finding("engine", "absent", "none of this bundle's engines runs here; see the reasons above")
