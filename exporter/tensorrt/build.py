"""ONNX -> serialized engine, by either backend of TensorRT, and the memory that takes. Knows no bundles."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from ...runtime.bundle.manifest import ModelInfo
from ...runtime.device.trt.engine import collecting_logger, find, missing
from ...runtime.errors import ExportError
from ...runtime.machine import available, forget_peak, peak
from .plan import Plan
from .targets import RTX

LONGEST_LIST = 8
# Measured with TensorRT-RTX 1.7 on models of 135M to 1.5B parameters: about 3.1 times the weights above the
# process.
FACTOR, BASE = 3.1, 500_000_000
PARTS = 1000  # of a build, as progress counts it
BuildProgress = Callable[[str, int, int], None]
"""Called with "engine", how much of the build is done, and PARTS."""


@dataclass(frozen=True, slots=True)
class Built:
    """A serialized engine. `seconds` of the build, `peak_memory` in bytes of this process during it."""

    data: bytes
    version: str
    cuda: str
    seconds: float
    peak_memory: int


def load(backend: str) -> ModuleType:
    """The TensorRT module of a backend. Raises ExportError that says how to install it."""
    trt = find(backend)
    if trt is None:
        raise ExportError(missing(backend))
    return trt


def memory(weight_bytes: int) -> int:
    """Bytes that building an engine from so many bytes of weights is expected to take."""
    return int(FACTOR * weight_bytes) + BASE


def require(weight_bytes: int, force: bool) -> None:
    """Raise ExportError when the build is not expected to fit and `force` is not given."""
    needed, there = memory(weight_bytes), available()
    if there is not None and needed > there and not force:
        raise ExportError(
            f"building an engine from {weight_bytes / 1e9:.2f} GB of weights takes about {needed / 1e9:.1f}"
            f" GB of memory"
            f" and {there / 1e9:.1f} GB are available; close other programs, use a narrower --precision or a"
            f" larger"
            " machine, or try all the same with --force"
        )


def build(
    plan: Plan, graph: Path, model: ModelInfo, is_fp32: bool, progress: BuildProgress | None = None
) -> Built:
    """Parse, check and build `graph`, an ONNX file with the plan's capacity and its weights beside it.

    Raises ExportError with TensorRT's own words, KeyboardInterrupt after a Ctrl-C during the build.
    """
    trt = load(plan.backend)
    logger = collecting_logger(trt)
    builder = trt.Builder(logger)
    network = parse(trt, logger, builder, graph)
    check(trt, network, plan, model, is_fp32)
    config = _config(trt, builder, plan, model)
    forget_peak()
    begun = perf_counter()
    with _interruptible() as stop:
        config.progress_monitor = _monitor(trt, progress or (lambda phase, done, total: None), stop)
        data = builder.build_serialized_network(network, config)
    if stop.reason is not None:
        raise stop.reason
    if data is None:
        raise ExportError(
            f"{plan.backend} {trt.__version__} cannot build {graph.name}: {logger.last(LONGEST_LIST)}"
        )
    return Built(bytes(data), trt.__version__, _cuda(trt), perf_counter() - begun, peak())


def parse(trt: Any, logger: Any, builder: Any, graph: Path) -> Any:
    """The network of an ONNX file, strongly typed: precision is what the graph says."""
    # TensorRT 11 has no other kind of network, and may have no flag for it.
    flags = getattr(getattr(trt, "NetworkDefinitionCreationFlag", None), "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        lines = [f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors[:LONGEST_LIST]] or [
            logger.last(LONGEST_LIST)
        ]
        raise ExportError(f"TensorRT {trt.__version__} cannot read {graph.name}:\n  " + "\n  ".join(lines))
    return network


def check(trt: Any, network: Any, plan: Plan, model: ModelInfo, is_fp32: bool) -> None:
    """Raise ExportError unless the parser kept what the result depends on; make fp32 attention buildable.

    TensorRT's parser has dropped inputs of Attention without a word: a network without masks builds, and
    computes nonsense.
    """
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    problems = []
    if plan.kv_layout == "static":
        updates = kinds.count(trt.LayerType.KV_CACHE_UPDATE)
        if updates != 2 * model.num_layers:
            problems.append(f"{updates} in-place KV writes instead of {2 * model.num_layers}")
        attentions = _attentions(trt, network, kinds)
        if len(attentions) != model.num_layers:
            problems.append(f"{len(attentions)} attentions instead of {model.num_layers}")
        unmasked = sum(a.mask is None for a in attentions)
        if unmasked:
            problems.append(f"{unmasked} attentions lost their mask")
        for attention in attentions:
            # No fused kernel exists for fp32: let TensorRT take the operator apart.
            attention.decomposable = is_fp32
    odd = plan.inputs(model)[0].keys() ^ {network.get_input(i).name for i in range(network.num_inputs)}
    if odd:
        problems.append(f"inputs differ: {', '.join(sorted(odd)[:LONGEST_LIST])}")
    if problems:
        raise ExportError(
            f"TensorRT {trt.__version__} read the graph wrongly, so no engine was built:"
            f" {'; '.join(problems)}"
        )


def _attentions(trt: Any, network: Any, kinds: Sequence[Any]) -> list[Any]:
    layers = [network.get_layer(i) for i, kind in enumerate(kinds) if kind == trt.LayerType.ATTENTION_INPUT]
    for layer in layers:
        layer.__class__ = trt.IAttentionInputLayer  # the binding returns the plain ILayer
    return [layer.attention for layer in layers]


def _config(trt: Any, builder: Any, plan: Plan, model: ModelInfo) -> Any:
    config = builder.create_builder_config()
    if not plan.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default: products of float32 with 10 bits
    if plan.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, plan.workspace)
    for shapes in plan.inputs(model):
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, least, best, most)
        config.add_optimization_profile(profile)
    if plan.backend == RTX:
        config.num_compute_capabilities = len(plan.target.compute_capabilities)
        for i, name in enumerate(plan.target.compute_capabilities):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), i):
                raise ExportError(
                    f"tensorrt_rtx {trt.__version__} cannot build for {name}; leave it out or use another"
                    f" version"
                )
        # Without it the runtime may allocate during a step, and a CUDA graph could not be captured.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    return config


def is_malformed(backend: str, data: bytes) -> bool:
    """Whether `data` is no engine of this backend at all. Needs no GPU; says nothing about whether it would
    run here.
    """
    trt = load(backend)
    _, diagnostics = trt.Runtime(collecting_logger(trt)).get_engine_validity(data)
    return bool(int(diagnostics) & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE))


def _cuda(trt: Any) -> str:
    """CUDA's major version of the installed wheel: NVIDIA names a wheel after it: tensorrt_rtx_cu12."""
    endings = [name.rpartition("cu")[2] for name in packages_distributions().get(trt.__name__, [])]
    return next((ending for ending in endings if ending.isdecimal()), "unknown")


class _Stop:
    """Why a build shall end early. An exception that crossed TensorRT's C++ frames would end the whole
    process.
    """

    reason: BaseException | None = None


def _monitor(trt: Any, report: BuildProgress, stop: _Stop) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """TensorRT's nested build phases as one number; returning False from a step cancels the build."""

        def __init__(self) -> None:
            super().__init__()
            self.phases: dict[str, tuple[int, int]] = {}  # open ones, outermost first: steps done, all steps
            self.shown = 0

        def phase_start(self, phase_name: str, _: str | None, num_steps: int) -> None:
            self.phases[phase_name] = (0, max(num_steps, 1))
            self.tell()

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name] = (step + 1, self.phases[phase_name][1])
            self.tell()
            return stop.reason is None

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)
            self.tell()

        def tell(self) -> None:
            share, position = 1.0, 0.0
            for done, total in self.phases.values():
                position += share * min(done / total, 1.0)
                share /= total
            # Phases open and close in an order of TensorRT's own: a bar must not run backwards.
            self.shown = max(self.shown, min(int(position * PARTS), PARTS - 1)) if self.phases else PARTS
            try:
                report("engine", self.shown, PARTS)
            except BaseException as error:
                stop.reason = error

    return Monitor()


@contextmanager
def _interruptible() -> Iterator[_Stop]:
    """Let Ctrl-C ask the build to stop instead of raising in the middle of it."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt(*_: object) -> None:
        stop.reason = KeyboardInterrupt()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
