"""Where NVIDIA's wheels put CUDA: folders that the loader does not look into. Loads them for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any


def library_folders(roots: Iterable[str] | None = None) -> list[Path]:
    """The `lib` folders of NVIDIA's wheels, wherever on the path they are installed: `nvidia/cu13/lib`,
    `nvidia/cudnn/lib`; of CUDA 12 one folder for each library.
    """
    if roots is None:
        spec = None
        with suppress(ImportError, ValueError):
            spec = find_spec("nvidia")
        roots = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [folder for root in roots for folder in sorted(Path(root).glob("*/lib")) if folder.is_dir()]


def load_libraries(ort: Any, folders: Iterable[Path] | None = None) -> None:
    """Load them into the process, so that the provider finds them. `ort` is the onnxruntime module.

    ONNX Runtime itself looks beside its own folder only, which misses wheels of another environment, such as
    those that PyTorch brought. What cannot be loaded is left to the provider, whose error says what it lacks.
    """
    preload = getattr(ort, "preload_dlls", None)
    if preload is None:
        return
    for folder in [None, *(library_folders() if folders is None else folders)]:
        with redirect_stdout(StringIO()), suppress(RuntimeError, OSError):
            preload(directory=None if folder is None else str(folder))
