"""Builds a serialized engine from an ONNX file with TensorRT or TensorRT-RTX."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from ...runtime.bundle.manifest import ModelInfo
from ...runtime.bundle.variant_info import PORTABLE
from ...runtime.device.trt.engine import collecting_logger, find, missing
from ...runtime.errors import ExportError, MarsWarning
from ...runtime.machine import available, forget_peak, peak
from .plan import RTX, EnginePlan

MAX_LIST = 8
# Memory of a build, measured with TensorRT-RTX 1.7 on models of 135M to 1.5B parameters: about 3.1 times the
# weights, and what the process takes.
FACTOR, BASE = 3.1, 500_000_000
# TensorRT's message about an attention without a fused kernel; that of RTX 1.7 has both words.
NOT_FUSED = re.compile("attention|decomposable", re.IGNORECASE)
PARTS = 1000  # steps of a build, as progress counts them
BuildProgress = Callable[[str, int, int], None]
"""Called with "engine", the parts of the build that are done, and PARTS."""


@dataclass(frozen=True, slots=True)
class Built:
    """A serialized engine, the duration of its build, and this process's peak memory in bytes during it."""

    data: bytes
    version: str
    cuda: str
    seconds: float
    peak_memory: int


def load(backend: str) -> ModuleType:
    """The TensorRT module of a backend. Raises ExportError if it is not installed."""
    trt = find(backend)
    if trt is None:
        raise ExportError(missing(backend))
    return trt


def memory(weight_bytes: int) -> int:
    """Bytes of memory that a build is expected to take."""
    return int(FACTOR * weight_bytes) + BASE


def require(weight_bytes: int, force: bool) -> None:
    """Raise ExportError if the build needs more memory than is available, unless `force` is given."""
    needed, free = memory(weight_bytes), available()
    if free is not None and needed > free and not force:
        raise ExportError(
            f"building an engine from {weight_bytes / 1e9:.2f} GB of weights takes about {needed / 1e9:.1f}"
            f" GB of memory and {free / 1e9:.1f} GB are available; close other programs, use a narrower"
            " --precision or a larger machine, or try it anyway with --force"
        )


def build(
    plan: EnginePlan, graph: Path, model: ModelInfo, is_fp32: bool, progress: BuildProgress | None = None
) -> Built:
    """Parse, check and build `graph`, an ONNX file with the plan's capacity and its weights in its directory.

    Attention in fp32 has no fused kernel and may be decomposed, in half precision only if TensorRT finds no
    kernel. Raises ExportError with TensorRT's message, and KeyboardInterrupt after a Ctrl-C during the build.
    """
    trt = load(plan.backend)
    forget_peak()
    start = perf_counter()
    is_decomposable = is_fp32 or plan.kv_layout == "appended"
    while True:
        logger = collecting_logger(trt)
        builder = trt.Builder(logger)
        network = parse(trt, logger, builder, graph)
        check(trt, network, plan, model, is_decomposable)
        config = _config(trt, builder, plan, model)
        monitor = config.progress_monitor = _monitor(trt, progress or (lambda phase, done, total: None))
        with _interruptible(monitor):
            data = builder.build_serialized_network(network, config)
        if monitor.stop is not None:
            raise monitor.stop
        if data is not None:
            return Built(bytes(data), trt.__version__, _cuda(trt), perf_counter() - start, peak())
        message = logger.last(MAX_LIST)
        if is_decomposable or not NOT_FUSED.search(message):
            raise ExportError(f"{plan.backend} {trt.__version__} cannot build {graph.name}: {message}")
        is_decomposable = True
        warnings.warn(
            "TensorRT has no fused kernel for this attention, so the engine is built again with several,"
            f" which are slower: {message}",
            MarsWarning,
            stacklevel=2,
        )


def parse(trt: Any, logger: Any, builder: Any, graph: Path) -> Any:
    """The network of an ONNX file, strongly typed: the graph decides each precision."""
    # TensorRT 11 has no other kind of network, and may not have the flag.
    flags = getattr(getattr(trt, "NetworkDefinitionCreationFlag", None), "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        lines = [f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors[:MAX_LIST]] or [
            logger.last(MAX_LIST)
        ]
        raise ExportError(f"TensorRT {trt.__version__} cannot read {graph.name}:\n  " + "\n  ".join(lines))
    return network


def check(trt: Any, network: Any, plan: EnginePlan, model: ModelInfo, is_decomposable: bool) -> None:
    """Raise ExportError if the parser lost something that the result depends on. Sets whether TensorRT may
    decompose attention.

    Some TensorRT parsers silently drop inputs of Attention: without masks the network builds, but its results
    are wrong.
    """
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    problems = []
    if plan.kv_layout == "in-place":
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
            attention.decomposable = is_decomposable
    mismatched = plan.inputs(model)[0].keys() ^ {network.get_input(i).name for i in range(network.num_inputs)}
    if mismatched:
        problems.append(f"inputs differ: {', '.join(sorted(mismatched)[:MAX_LIST])}")
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


def _config(trt: Any, builder: Any, plan: EnginePlan, model: ModelInfo) -> Any:
    config = builder.create_builder_config()
    if not plan.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default; it rounds float32 products to 10 bits
    if plan.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, plan.workspace)
    for shapes in plan.inputs(model):
        profile = builder.create_optimization_profile()
        for name, (smallest, best, largest) in shapes.items():
            profile.set_shape(name, smallest, best, largest)
        config.add_optimization_profile(profile)
    if plan.backend == RTX:
        # Without the flag the runtime may allocate during a step, which a CUDA graph cannot capture.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if plan.backend == RTX and plan.target.compute_capabilities != (PORTABLE,):
        config.num_compute_capabilities = len(plan.target.compute_capabilities)
        for i, name in enumerate(plan.target.compute_capabilities):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), i):
                raise ExportError(
                    f"tensorrt_rtx {trt.__version__} cannot build for {name}; leave it out or use another"
                    f" version"
                )
    return config


def _cuda(trt: Any) -> str:
    """CUDA's major version, from the name of the installed wheel, such as tensorrt_rtx_cu12."""
    endings = [name.rpartition("cu")[2] for name in packages_distributions().get(trt.__name__, [])]
    return next((ending for ending in endings if ending.isdecimal()), "unknown")


def _monitor(trt: Any, report: BuildProgress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Reports TensorRT's nested build phases as a number.

        A step that returns False ends the build. `stop` says why: an exception must not cross TensorRT's C++
        frames, because it would end the process.
        """

        def __init__(self) -> None:
            super().__init__()
            self.stop: BaseException | None = None
            self.phases: dict[str, tuple[int, int]] = {}  # running ones, outermost first: steps done, steps
            self.shown = 0

        def phase_start(self, phase_name: str, _: str | None, num_steps: int) -> None:
            self.phases[phase_name] = (0, max(num_steps, 1))
            self.update()

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name] = (step + 1, self.phases[phase_name][1])
            self.update()
            return self.stop is None

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)
            self.update()

        def update(self) -> None:
            share, position = 1.0, 0.0
            for done, total in self.phases.values():
                position += share * min(done / total, 1.0)
                share /= total
            # Phases start and finish in any order, but a bar must not run backwards.
            self.shown = max(self.shown, min(int(position * PARTS), PARTS - 1)) if self.phases else PARTS
            try:
                report("engine", self.shown, PARTS)
            except BaseException as error:
                self.stop = error

    return Monitor()


@contextmanager
def _interruptible(monitor: Any) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop the build at its next step instead of raising inside TensorRT."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        monitor.stop = KeyboardInterrupt()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
