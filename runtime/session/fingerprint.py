"""The identity of a step's results: the files of a variant, the library, the machine."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping

from .. import machine
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..bundle.profiles import sha256_of
from ..device.ort.library import version_and_devices


def fingerprint(bundle: Bundle, variant: Variant, device: str, options: Mapping[str, str] | None) -> str:
    """32 hex digits, the same for sessions whose steps give the same bits."""
    manifest = bundle.manifest
    key = [
        sha256_of(manifest, variant.file),
        sha256_of(manifest, variant.weights),
        variant.precision,
        variant.accuracy_level,
        variant.kv_dtype,
        variant.backend,
        variant.engine.version if variant.engine is not None else version_and_devices(),
        device,
        platform.machine(),
        machine.processor(),
        sorted(machine.cpu_flags()),
        machine.gpus() if device.startswith("cuda") else [],
        sorted((options or {}).items()),
    ]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
