"""A deserialized engine: loaded or refused with both sides named, its execution contexts, and RTX's cache of
compiled kernels.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..bundle.manifest import Bundle, Variant
from ..errors import SessionError
from .cuda import find_gpu

if TYPE_CHECKING:
    from .cuda import Device

EXTRAS = {"tensorrt": "trt", "tensorrt_rtx": "rtx"}


class LoadedEngine:
    """An engine in device memory. `scratch_bytes`: working memory that all its contexts share, one step at a
    time.
    """

    def __init__(self, trt: Any, engine: Any, logger: Any, kernels: Path | None) -> None:
        self._trt, self._engine, self._logger, self._kernels = trt, engine, logger, kernels
        self.scratch_bytes = int(engine.device_memory_size_v2)
        self._config = self._cache = None
        self._kept = 0
        if hasattr(trt, "IRuntimeCache"):
            self._prepare_kernels()

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant, device: Device) -> LoadedEngine:  # noqa: ARG003  (a context on the GPU must exist)
        """Load a variant's engine. Raises SessionError."""
        assert variant.engine is not None
        trt = load(variant.backend)
        logger = collecting_logger(trt)
        path = bundle.path / variant.file
        data = path.read_bytes()
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            reasons = [*_diagnostics(trt, runtime, data), logger.last(3)]
            raise SessionError(
                f"{path}: {built_for(variant)} and cannot be loaded here ({here(variant.backend)}):"
                f" {'; '.join(reasons)}"
            )
        sha = next((f.sha256 for f in bundle.manifest.files if f.path == variant.file), "")
        return cls(trt, engine, logger, _kernel_file(bundle, variant, sha))

    def new_context(self, range_index: int, scratch: int, stream: Any) -> Any:
        """A context for one optimization profile, using the shared scratch memory. Raises SessionError when
        TensorRT refuses.
        """
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy if self._config is None else self._config)
        if context is None:
            raise SessionError(f"TensorRT could not create an execution context: {self.last_error()}")
        context.set_device_memory(scratch, self.scratch_bytes)
        if not context.set_optimization_profile_async(range_index, int(stream)):
            raise SessionError(f"the engine has no optimization profile {range_index}; build it again")
        return context

    def last_error(self) -> str:
        return str(self._logger.last())

    def keep_kernels(self) -> None:
        """Write RTX's compiled kernels to the file beside the bundle if there are new ones, so that the next
        start is warm.
        """
        if self._cache is None or self._kernels is None:
            return
        data = bytes(self._cache.serialize())
        if len(data) == self._kept:
            return
        self._kept = len(data)
        try:
            write_whole(self._kernels, data)
        except OSError:
            self._kernels = (
                None  # a place that cannot be written: every start compiles anew, and nothing else changes
            )

    def _prepare_kernels(self) -> None:
        trt = self._trt
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # Not lazily: a graph captured before the better kernels are ready would replay the stopgaps for ever.
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        cache = config.create_runtime_cache()
        if self._kernels is not None and self._kernels.is_file():
            data = self._kernels.read_bytes()
            # A cache of another GPU or version is not used by TensorRT, and is written anew.
            self._kept = len(data) if cache.deserialize(data) else 0
        config.set_runtime_cache(cache)
        self._config, self._cache = config, cache


def load(backend: str) -> ModuleType:
    """The TensorRT module of a backend. Raises SessionError that says how to install it."""
    try:
        if backend == "tensorrt_rtx":
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt
    except ImportError as error:
        raise SessionError(
            f"{backend} is not installed; pip install 'mars-export[{EXTRAS[backend]}]'"
        ) from error
    return trt  # type: ignore[no-any-return]


def installed_version(backend: str) -> str | None:
    """The version of the installed TensorRT of a backend, None when it is absent."""
    try:
        return str(load(backend).__version__)
    except SessionError:
        return None


def built_for(variant: Variant) -> str:
    """What an engine was built with and for, in one phrase."""
    info = variant.engine
    if info is None:
        return f"a {variant.backend} engine of unknown origin"
    return f"built with {variant.backend} {info.version} (CUDA {info.cuda}) for {', '.join(info.compute_capabilities)} on {info.platform}"


def here(backend: str) -> str:
    """This machine's side of the same."""
    gpu = find_gpu()
    device = gpu if isinstance(gpu, str) else f"{gpu.name}, {gpu.capability}, driver for CUDA {gpu.driver}"
    return f"{backend} {installed_version(backend) or 'not installed'}; {device}"


def _diagnostics(trt: Any, runtime: Any, data: bytes) -> list[str]:
    if not hasattr(runtime, "get_engine_validity"):
        return []
    _, found = runtime.get_engine_validity(data)
    names = (
        "VERSION_MISMATCH",
        "UNSUPPORTED_CC",
        "OLD_CUDA_DRIVER",
        "OLD_CUDA_RUNTIME",
        "INSUFFICIENT_GPU_MEMORY",
        "MALFORMED_ENGINE",
        "CUDA_ERROR",
    )
    kinds = trt.EngineInvalidityDiagnostics
    return [
        name.lower().replace("_", " ")
        for name in names
        if hasattr(kinds, name) and int(found) & int(getattr(kinds, name))
    ]


def _kernel_file(bundle: Bundle, variant: Variant, sha: str) -> Path | None:
    directory = bundle.path.resolve()
    return directory.parent / f".{directory.name}.{variant.name}-{sha[:12]}.kernels"


def collecting_logger(trt: Any) -> Any:
    """A TensorRT logger that keeps `errors` instead of printing them; `last()` says the newest in words."""

    class Collected(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors = [*self.errors[-20:], message]

        def last(self, count: int = 1) -> str:
            return "\n  ".join(self.errors[-count:]) or "it gave no reason"

    return Collected()
