"""The onnxruntime library: its import, the provider of each device, its own options, and plain graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from ...bundle.manifest import Variant
from ...errors import DeviceLost, SessionError
from ..failures import RESTART, first_line, is_lasting, memory_advice
from ..name import DeviceName
from .kernels import exact_entries, installed

# The providers of a device; the first that this library has is used. CUDA's is a plugin if its library is
# beside ONNX Runtime's own, or was registered by the application.
PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CudaPluginExecutionProvider"),
}
CUDA_PLUGIN = "libonnxruntime_providers_cuda_plugin.so"
EXTRAS = {"cpu": "cpu", "cuda": "gpu"}
# Both packages have the files of `onnxruntime/`; those of the one installed last are used.
REPLACE = "pip install --force-reinstall --no-deps onnxruntime-gpu"
# Read when the library is loaded. Since 1.31 ONNX Runtime sends telemetry from threads of its own, which
# crash the process if they get no memory.
NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")
LEVEL = "session.qdq_matmulnbits_accuracy_level"  # set by the variant, because profiles depend on it
GRAPHS = "enable_cuda_graph"
CPU = DeviceName("cpu")
# Of products with int4 and int8 weights: 0 and 1 compute in fp32, 2 in fp16, 3 in bf16, 4 with activations in
# 8-bit blocks.
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
FASTEST_LEVEL = 4
LEVELED = ("int4", "int8")
RECURRENT_OLDEST = (1, 32)  # whose operators for recurrent layers were tested
GPU_ADVICE = (
    "; check the GPU with nvidia-smi and the CUDA libraries with `mars-export doctor`, or give --device cpu"
)


def load(device: str) -> tuple[Any, str]:
    """The onnxruntime module, and the device's provider. Raises SessionError if one is missing."""
    install = f"pip install 'mars-export[{EXTRAS[device]}]'"
    ort = _import()
    if ort is None:
        raise SessionError(f"onnxruntime is not installed; {install}")
    provider = provider_of(ort, device)
    if provider is None:
        raise SessionError(
            f"this onnxruntime {ort.__version__} has no {PROVIDERS[device][0]} (it has:"
            f" {', '.join(ort.get_available_providers())});"
            f" {install}, then {REPLACE}"
        )
    if device == "cuda":
        load_libraries(ort)
    return ort, provider


def _import() -> Any | None:
    """The module; None if it is not installed. Raises SessionError if it cannot be loaded."""
    os.environ.setdefault(*NO_TELEMETRY)
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt | SystemExit):  # a signal while it was loaded
            raise error.__cause__ from None
        raise SessionError(f"onnxruntime cannot be loaded: {first_line(error)}; install it again") from error
    return onnxruntime


def provider_of(ort: Any, device: str) -> str | None:
    """The first of a device's providers that this library has, built in or as a registered plugin."""
    plugin = Path(ort.__file__).parent / "capi" / CUDA_PLUGIN
    names = {*ort.get_available_providers(), *(d.ep_name for d in ort.get_ep_devices())}
    if device == "cuda" and names.isdisjoint(PROVIDERS["cuda"]) and plugin.exists():
        ort.register_execution_provider_library(PROVIDERS["cuda"][1], str(plugin))
        names |= {d.ep_name for d in ort.get_ep_devices()}
    return next((name for name in PROVIDERS[device] if name in names), None)


def version_and_devices() -> tuple[str, list[str]] | None:
    """The version of the installed onnxruntime and the devices it can use; None if it cannot be used."""
    ort = None
    with suppress(SessionError):
        ort = _import()
    if ort is None:
        return None
    return ort.__version__, [device for device in PROVIDERS if provider_of(ort, device) is not None]


def check_recurrent() -> None:
    """Raise SessionError if ONNX Runtime has no operators for recurrent layers."""
    version = load("cpu")[0].__version__
    if tuple(map(int, version.split(".")[:2])) < RECURRENT_OLDEST:
        wanted = ".".join(map(str, RECURRENT_OLDEST))
        raise SessionError(f"recurrent layers need onnxruntime {wanted} or newer, {version} is installed")


def library_folders(roots: Iterable[str] | None = None) -> list[Path]:
    """The `lib` folders of NVIDIA's wheels, wherever on the path they are installed: `nvidia/cu13/lib`,
    `nvidia/cudnn/lib`; CUDA 12 has one folder for each library.
    """
    if roots is None:
        spec = None
        with suppress(ImportError, ValueError):
            spec = find_spec("nvidia")
        roots = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [folder for root in roots for folder in sorted(Path(root).glob("*/lib")) if folder.is_dir()]


def load_libraries(ort: Any, folders: Iterable[Path] | None = None) -> None:
    """Load the CUDA libraries of NVIDIA's wheels into the process, so that the provider finds them.

    ONNX Runtime itself looks only beside its own folder, which misses wheels of another environment, such as
    the ones that PyTorch installed. If one cannot be loaded, the provider's error names what is missing.
    """
    for folder in [None, *(library_folders() if folders is None else folders)]:
        with suppress(RuntimeError, OSError):
            _silent(ort.preload_dlls)(directory=None if folder is None else str(folder))


def _silent(function: Any) -> Callable[..., Any]:
    """A copy of a Python function in which `print` does nothing. Redirecting standard output would silence
    other threads, too.
    """
    values = function.__globals__ | {"print": lambda *_, **__: None}
    return FunctionType(function.__code__, values, None, function.__defaults__, function.__closure__)


def split_options(options: Mapping[str, str], device: DeviceName) -> tuple[dict[str, str], dict[str, str]]:
    """The user's options for ONNX Runtime in two parts: entries of the session's configuration, whose names
    have a dot ("session.intra_op.allow_spinning"), and options of the execution provider ("device_id").

    Raises SessionError for values that are not texts, for provider options on the CPU, for the
    accuracy level, and for a device_id that contradicts the device's number.
    """
    problems = [
        f"{k!r}: {v!r}" for k, v in options.items() if not (isinstance(k, str) and isinstance(v, str))
    ]
    if problems:
        raise SessionError(f"options must map strings to strings, not {', '.join(problems)}")
    if LEVEL in options:
        raise SessionError(f"{LEVEL} is not an option; use accuracy_level")
    entries = {key: value for key, value in options.items() if "." in key}
    provider_options = {key: value for key, value in options.items() if "." not in key}
    if provider_options and device.kind == "cpu":
        raise SessionError(
            f"the CPU has no option {', '.join(provider_options)}; names of ONNX Runtime's own options have a"
            " dot, such as session.intra_op.allow_spinning"
        )
    if device.number is not None:
        number = provider_options.setdefault("device_id", str(device.number))
        if number != str(device.number):
            raise SessionError(
                f"the device has number {device.number}, but device_id is {number[:60]}; give only the device"
            )
    return entries, provider_options


def open_session(
    ort: Any,
    graph: Path,
    providers: Sequence[Any],
    entries: Mapping[str, str],
    threads: int | None = None,
    *,
    arena: bool = True,
    operators: Path | None = None,
    remedy: str = "",
) -> Any:
    """An InferenceSession with these configuration entries, and the operators of a library. Raises
    SessionError that ends with `remedy`.

    Without `arena`, memory on the CPU is freed as soon as it is unused.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = arena
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        if operators is not None:
            options.register_custom_ops_library(str(operators))
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        # The fallback to the CPU is off: it prints to standard output, and tries the same again.
        return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
        raise SessionError(
            f"{graph}: ONNX Runtime cannot load the graph: {first_line(error)}{remedy}"
        ) from error


def level_of(variant: Variant) -> int:
    """The accuracy level that a session uses. Raises SessionError if there is no such level, or none of this
    variant.
    """
    level = variant.accuracy_level
    if level is not None and variant.precision not in LEVELED:
        raise SessionError(
            f"variant {variant.name} is {variant.precision}: an accuracy level is for"
            f" {' and '.join(LEVELED)} weights"
        )
    level = FASTEST_LEVEL if level is None else level
    if level not in ACCURACY_LEVELS:
        raise SessionError(
            f"accuracy level must be one of {', '.join(map(str, ACCURACY_LEVELS))}, not {level}"
        )
    return level


def failed(error: Exception, rows: int, slots: int) -> SessionError:
    """The error of a step of this size; onnxruntime raises its own classes, and plain RuntimeError."""
    what = f"ONNX Runtime failed in a step of {rows} x {slots} slots: {first_line(error)}"
    if is_lasting(str(error)):
        return DeviceLost(what + RESTART)
    advice = memory_advice(error)
    return SessionError(what + advice, code="out_of_memory" if advice else "failed")


Results = dict[str, np.ndarray]
"""Output arrays by name."""


def open_graph(
    graph: Path, accuracy_level: int, pack: bool = True, exact: bool = False
) -> Callable[[Mapping[str, np.ndarray]], Results]:
    """Any graph on the CPU as a function of arrays, for checking parts of a model. Its memory is freed with
    the function.

    Without `pack` weights are not copied into a layout for faster products, which halves the memory of a
    float graph. With `exact`, for w8a8 and w4a8, products of bytes are exact on every processor, and
    mars-export-kernels are used if they are installed.
    """
    ort, provider = load("cpu")
    entries = {"session.disable_prepacking": "0" if pack else "1", LEVEL: str(accuracy_level)}
    package = installed() if exact else None
    entries |= exact_entries(ort, entries) if exact and package is None else {}
    operators = None if package is None else package.library
    session = open_session(ort, graph, [provider], entries, arena=False, operators=operators)
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
