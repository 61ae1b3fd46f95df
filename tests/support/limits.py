"""Limits that a test sets on its own process, and a model and steps that are held against them."""

from __future__ import annotations

import resource

from mars_export.runtime.bundle.manifest import ModelInfo
from mars_export.runtime.device.scratch import Scratch

MODEL = ModelInfo("llama", 32_000, 2048, 24, 16, 8, 128, 8192)
MB = 1 << 20


def left(limits: dict[int, int], kind: int, pages: int, bytes_left: int) -> None:
    limits[kind] = pages * resource.getpagesize() + bytes_left


def step(scratch: Scratch, *size: int) -> None:
    """One that is let through, or not, and ends well."""
    with scratch.step(*size):
        pass
