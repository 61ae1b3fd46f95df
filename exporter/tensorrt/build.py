"""ONNX -> serialized engine, with full TensorRT or TensorRT-RTX: one Python API under two names. Knows shapes, not bundles."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from ...runtime.device.trt_engine import collecting_logger
from ...runtime.errors import ExportError
from ...runtime.machine import forget_peak, peak

BACKENDS = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
INSTALL = {
    "tensorrt": "pip install 'mars-export[trt]' (on a Jetson it comes with JetPack: python3-libnvinfer)",
    "rtx": "pip install 'mars-export[rtx]'",
}
LONGEST_LIST = 8
PARTS = 1000  # of a build, as progress counts it
BuildProgress = Callable[[str, int, int], None]
"""Called with "engine", how much of the build is done, and PARTS."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """An engine to build.

    `graph`: an ONNX file with a fixed capacity, its weights beside it. `inputs`: for each range, input name -> (min, opt, max)
    shape. `compute_capabilities` empty: for the GPU of this machine. `num_layers`, `in_place`: what the parsed network must hold.
    """

    flavor: str
    graph: Path
    inputs: tuple[Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], ...]
    compute_capabilities: tuple[str, ...]
    num_layers: int
    in_place: bool
    is_fp32: bool


@dataclass(frozen=True, slots=True)
class Built:
    """A serialized engine. `seconds` of the build, `peak_memory` in bytes of this process during it."""

    data: bytes
    version: str
    cuda: str
    seconds: float
    peak_memory: int


def load(flavor: str) -> ModuleType:
    """The TensorRT module of a flavor. Raises ExportError that says how to install it."""
    try:
        if flavor == "rtx":
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt
    except ImportError as error:
        raise ExportError(f"{BACKENDS[flavor]} is not installed here; {INSTALL[flavor]}") from error
    return trt  # type: ignore[no-any-return]


def version(flavor: str) -> tuple[int, int] | None:
    """(major, minor) of the installed TensorRT of a flavor, None when it is absent."""
    try:
        major, minor = load(flavor).__version__.split(".")[:2]
    except ExportError:
        return None
    return int(major), int(minor)


def build(request: BuildRequest, progress: BuildProgress | None = None) -> Built:
    """Parse, check and build. Raises ExportError with TensorRT's own words, KeyboardInterrupt after a Ctrl-C during the build."""
    trt = load(request.flavor)
    logger = collecting_logger(trt)
    builder = trt.Builder(logger)
    network = parse(trt, logger, builder, request.graph)
    check(trt, network, request)
    config = _config(trt, builder, request)
    forget_peak()
    begun = perf_counter()
    with _interruptible() as stop:
        config.progress_monitor = _monitor(trt, progress or (lambda phase, done, total: None), stop)
        data = builder.build_serialized_network(network, config)
    if stop.reason is not None:
        raise stop.reason
    if data is None:
        raise ExportError(
            f"{BACKENDS[request.flavor]} {trt.__version__} cannot build {request.graph.name}: {logger.last(LONGEST_LIST)}"
        )
    return Built(bytes(data), trt.__version__, _cuda(trt), perf_counter() - begun, peak())


def parse(trt: Any, logger: Any, builder: Any, graph: Path) -> Any:
    """The network of an ONNX file, strongly typed: precision is what the graph says."""
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        lines = [f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors[:LONGEST_LIST]] or [
            logger.last(LONGEST_LIST)
        ]
        raise ExportError(f"TensorRT {trt.__version__} cannot read {graph.name}:\n  " + "\n  ".join(lines))
    return network


def check(trt: Any, network: Any, request: BuildRequest) -> None:
    """Raise ExportError unless the parser kept what the result depends on; make fp32 attention buildable.

    TensorRT's parser has dropped inputs of Attention without a word: a network without masks builds, and computes nonsense.
    """
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    problems = []
    if request.in_place:
        updates = kinds.count(trt.LayerType.KV_CACHE_UPDATE)
        if updates != 2 * request.num_layers:
            problems.append(f"{updates} in-place KV writes instead of {2 * request.num_layers}")
        attentions = _attentions(trt, network, kinds)
        if len(attentions) != request.num_layers:
            problems.append(f"{len(attentions)} attentions instead of {request.num_layers}")
        unmasked = sum(a.mask is None for a in attentions)
        if unmasked:
            problems.append(f"{unmasked} attentions lost their mask")
        for attention in attentions:
            # No fused kernel exists for fp32: let TensorRT take the operator apart.
            attention.decomposable = request.is_fp32
    wanted = {name for shapes in request.inputs for name in shapes}
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    if wanted != names:
        problems.append(f"inputs differ: {', '.join(sorted(wanted ^ names)[:LONGEST_LIST])}")
    if problems:
        raise ExportError(
            f"TensorRT {trt.__version__} read {request.graph.name} wrongly, so no engine was built: {'; '.join(problems)}"
        )


def _attentions(trt: Any, network: Any, kinds: Sequence[Any]) -> list[Any]:
    found = []
    for i, kind in enumerate(kinds):
        if kind == trt.LayerType.ATTENTION_INPUT:
            layer = network.get_layer(i)
            layer.__class__ = trt.IAttentionInputLayer  # the binding returns the plain ILayer
            found.append(layer.attention)
    return found


def _config(trt: Any, builder: Any, request: BuildRequest) -> Any:
    config = builder.create_builder_config()
    for shapes in request.inputs:
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, least, best, most)
        config.add_optimization_profile(profile)
    if request.flavor == "rtx":
        config.num_compute_capabilities = len(request.compute_capabilities)
        for i, name in enumerate(request.compute_capabilities):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), i):
                raise ExportError(
                    f"tensorrt_rtx {trt.__version__} cannot build for {name}; leave it out or use another version"
                )
        # Without it the runtime may allocate during a step, and a CUDA graph could not be captured.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    return config


def is_malformed(flavor: str, data: bytes) -> bool:
    """Whether `data` is no engine of this flavor at all. Needs no GPU; says nothing about whether it would run here."""
    trt = load(flavor)
    _, diagnostics = trt.Runtime(collecting_logger(trt)).get_engine_validity(data)
    return bool(int(diagnostics) & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE))


def _cuda(trt: Any) -> str:
    """CUDA's major version of the installed wheel: NVIDIA names a wheel after it, such as tensorrt_rtx_cu12."""
    from importlib.metadata import packages_distributions

    names = packages_distributions().get(trt.__name__, [])
    found = [name.rpartition("cu")[2] for name in names if name.rpartition("cu")[2].isdecimal()]
    return found[0] if found else "unknown"


class _Stop:
    """Why a build shall end early. An exception that crossed TensorRT's C++ frames would end the whole process."""

    reason: BaseException | None = None


def _monitor(trt: Any, report: BuildProgress, stop: _Stop) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """TensorRT's nested build phases as one number; returning False from a step cancels the build."""

        def __init__(self) -> None:
            super().__init__()
            self.phases: dict[
                str, tuple[int, int]
            ] = {}  # open phases, outermost first: steps done, all steps
            self.shown = 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
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
