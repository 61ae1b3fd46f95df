"""What the makers of tests/conformance and the tests of their files share. A maker is found by its path: its
folder is no package.
"""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from support.paths import CONFORMANCE

GAMMA, MASK64 = 0x9E3779B97F4A7C15, 2**64 - 1


def maker(name: str) -> ModuleType:
    spec = spec_from_file_location(f"conformance_{name}", CONFORMANCE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CONFORMANCE / name).read_text(encoding="utf-8"))
    return found


def text_of(values: list[dict[str, Any]]) -> str:
    """One value a line, so that a diff can be read."""
    return "[\n" + ",\n".join(f"  {json.dumps(value, allow_nan=False)}" for value in values) + "\n]\n"


def write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


def mix(z: int) -> int:
    """The output of Vigna's splitmix64 behind the state `z`."""
    z = (z + GAMMA) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)
