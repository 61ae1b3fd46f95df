"""A deserialized engine: its contexts, the check of its tensors, and RTX's cache of compiled kernels.

This is the only file that imports TensorRT. Full TensorRT and TensorRT-RTX have one Python API and two module
names, which are the names of their backends.
"""

from __future__ import annotations

from importlib import import_module
from io import SEEK_END
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import ModuleType
from typing import Any

from ...bundle.files import write_whole
from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...errors import SessionError
from ..cuda import find_gpu
from ..step_io import IDS

EXTRAS = {"tensorrt": "trt", "tensorrt_rtx": "rtx"}
REMARKS = {"tensorrt": " (on a Jetson it comes with JetPack: python3-libnvinfer)"}
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
INVALIDITIES = (
    *("VERSION_MISMATCH", "UNSUPPORTED_CC", "OLD_CUDA_DRIVER", "OLD_CUDA_RUNTIME", "INSUFFICIENT_GPU_MEMORY"),
    *("MALFORMED_ENGINE", "CUDA_ERROR"),
)


def find(backend: str) -> ModuleType | None:
    """The TensorRT module of a backend; None if it is not installed."""
    try:
        return import_module(backend)
    except ImportError:
        return None


def missing(backend: str) -> str:
    """The error message for a module that is not installed."""
    return f"{backend} is not installed here; {install(backend)}"


def install(backend: str) -> str:
    return f"pip install 'mars-export[{EXTRAS[backend]}]'{REMARKS.get(backend, '')}"


def installed_version(backend: str) -> str | None:
    """The installed TensorRT version of a backend; None if it is not installed."""
    trt = find(backend)
    return None if trt is None else str(trt.__version__)


class LoadedEngine:
    """An engine in device memory. `scratch_bytes`: working memory that all its contexts share, because one
    step runs at a time.
    """

    def __init__(self, trt: Any, engine: Any, logger: Any, kernels: Path | None) -> None:
        self._trt, self._engine, self._logger, self._kernels = trt, engine, logger, kernels
        self.scratch_bytes = int(engine.device_memory_size_v2)
        self._config = self._cache = None
        self._num_written = 0
        if hasattr(trt, "IRuntimeCache"):
            self._prepare_kernels()

    @classmethod
    def load(cls, bundle: Bundle, variant: Variant, gpu: int = 0) -> LoadedEngine:
        """Load a variant's engine on `gpu`, which has a CUDA context and is current. Raises SessionError."""
        assert variant.engine is not None
        trt = find(variant.backend)
        if trt is None:
            raise SessionError(missing(variant.backend))
        logger = collecting_logger(trt)
        path = bundle.path / variant.file
        data = _mapped(path)
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            reasons = "; ".join([*_diagnostics(trt, runtime, data), logger.last(3)])
            raise SessionError(
                f"{path}: {built_for(variant)} and cannot be loaded here ({installed(variant.backend, gpu)}):"
                f" {reasons}"
            )
        mismatched = mismatches(engine, variant, bundle.manifest.model)
        if mismatched:
            raise SessionError(
                f"{path}: the engine and the manifest disagree about {', '.join(mismatched[:6])};"
                " build the engine again"
            )
        sha = next((f.sha256 for f in bundle.manifest.files if f.path == variant.file), "")
        return cls(trt, engine, logger, _kernel_file(bundle, variant, sha))

    def new_context(self, range_index: int, scratch: int, stream: Any) -> Any:
        """A context for one optimization profile, with the shared scratch memory. Raises SessionError."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy if self._config is None else self._config)
        if context is None:
            raise SessionError(f"TensorRT could not create an execution context: {self.last_error()}")
        context.set_device_memory(scratch, self.scratch_bytes)
        if not context.set_optimization_profile_async(range_index, int(stream)):
            raise SessionError(f"the engine has no optimization profile {range_index}; build it again")
        return context

    def width(self, name: str) -> int:
        """Values of an output for each prediction: the vocabulary size, or k of a top-k."""
        return int(self._engine.get_tensor_shape(name)[-1])

    def is_capturable(self, context: Any, stream: Any) -> bool:
        """Whether the context's step can be captured, as far as this TensorRT can tell."""
        test = getattr(context, "is_stream_capturable", None)  # RTX since 1.2
        return test is None or bool(test(int(stream)))

    def last_error(self) -> str:
        return str(self._logger.last())

    def keep_kernels(self) -> None:
        """Write RTX's newly compiled kernels to the file beside the bundle, for a fast next start."""
        if self._cache is None or self._kernels is None:
            return
        data = bytes(self._cache.serialize())
        if len(data) == self._num_written:
            return
        self._num_written = len(data)
        try:
            write_whole(self._kernels, data)
        except OSError:
            self._kernels = None  # not writable: every start compiles again, and nothing else changes

    def _prepare_kernels(self) -> None:
        trt = self._trt
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # Not lazily: a graph that is captured too early would replay the slow fallback kernels forever.
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        cache = config.create_runtime_cache()
        if self._kernels is not None and self._kernels.is_file():
            data = self._kernels.read_bytes()
            # TensorRT does not use a cache of another GPU or version; it is written again.
            self._num_written = len(data) if cache.deserialize(data) else 0
        config.set_runtime_cache(cache)
        self._config, self._cache = config, cache


def built_for(variant: Variant) -> str:
    """The versions and GPUs that an engine was built for."""
    info = variant.engine
    assert info is not None
    gpus = ", ".join(info.compute_capabilities)
    return f"built with {variant.backend} {info.version} (CUDA {info.cuda}) for {gpus} on {info.platform}"


def installed(backend: str, number: int) -> str:
    """The same of this machine, with the GPU of that number."""
    gpu = find_gpu(number)
    device = gpu if isinstance(gpu, str) else f"{gpu.name}, {gpu.capability}, driver for CUDA {gpu.driver}"
    return f"{backend} {installed_version(backend) or 'not installed'}; {device}"


def mismatches(engine: Any, variant: Variant, model: ModelInfo) -> list[str]:
    """Names of the engine's tensors that contradict the manifest in direction, type, shape or KV layout."""
    kv, suffixes = TYPES[variant.kv_dtype], model.kv_suffixes
    types = dict.fromkeys(("input_ids", "kv_length", "output_index"), ("INPUT", "INT64"))
    types |= {name: ("OUTPUT", "INT64" if name in IDS else "FLOAT") for name in variant.outputs}
    types |= {f"past_key_values.{s}": ("INPUT", kv) for s in suffixes}
    types |= {f"present.{s}": ("OUTPUT", kv) for s in suffixes}
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    actual = {n: (engine.get_tensor_mode(n).name, engine.get_tensor_dtype(n).name) for n in names}
    mismatched = {name for name in types.keys() | actual.keys() if types.get(name) != actual.get(name)}
    shape, in_place = (model.num_kv_heads, variant.capacity, model.head_dim), variant.kv_layout == "in-place"
    wide = [
        name for name in ("logits", "topk_ids", "topk_logprobs") if name in variant.outputs and not mismatched
    ]
    sizes = {name: tuple(engine.get_tensor_shape(name))[2:] for name in wide}
    expected = {"logits": (model.vocab_size,), "topk_logprobs": sizes.get("topk_ids")}
    for name, size in sizes.items():
        is_width = len(size) == 1 and 0 < size[0] <= model.vocab_size
        if size != expected.get(name, size) or not is_width:
            mismatched.add(name)
    for suffix in suffixes if not mismatched else ():
        past, present = f"past_key_values.{suffix}", f"present.{suffix}"
        if tuple(engine.get_tensor_shape(past))[1:] != shape:
            mismatched.add(past)
        # Since TensorRT 10.15, which has the only operator that writes in place.
        if hasattr(engine, "get_aliased_input_tensor"):
            alias = engine.get_aliased_input_tensor(present)
            mismatched |= {present} if (alias == past) != in_place else set()
    return sorted(mismatched)


def _mapped(path: Path) -> mmap | bytes:
    """A memory-mapped file, so that the engine is not in host memory twice while it loads."""
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        return mmap(file.fileno(), size, access=ACCESS_READ) if size else b""


def _diagnostics(trt: Any, runtime: Any, data: mmap | bytes) -> list[str]:
    if not hasattr(runtime, "get_engine_validity"):
        return []
    _, bits = runtime.get_engine_validity(data)
    kinds = trt.EngineInvalidityDiagnostics
    names = [name for name in INVALIDITIES if hasattr(kinds, name) and int(bits) & int(getattr(kinds, name))]
    return [name.lower().replace("_", " ") for name in names]


def _kernel_file(bundle: Bundle, variant: Variant, sha: str) -> Path | None:
    directory = bundle.path.resolve()
    return directory.parent / f".{directory.name}.{variant.name}-{sha[:12]}.kernels"


def collecting_logger(trt: Any) -> Any:
    """A TensorRT logger that keeps `errors` instead of printing them; `last()` returns the newest."""

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
