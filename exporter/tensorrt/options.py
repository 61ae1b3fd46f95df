"""The options of an engine, as `mars-export trt` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ...runtime.terminal.options import MostBytes

AtLeastOne = typer.Option(min=1)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built.

    Engine:
    target: rtx, sm75 ... sm121, host, jetson-orin, jetson-thor, h100 or h200.
    kv_layout: in-place or appended; by default what the target's TensorRT supports.
    tf32: Round float32 products to TF32: faster, but less exact.
    workspace: GPU memory that a layer may use for itself, such as 512M or 4G; TensorRT's default is most of
        it.
    build: Build the engine if this machine can, or only write the graph and a recipe.

    Shapes:
    batch: Maximum batch size.
    capacity: KV entries of a row: 1024, or the model's context if that is less.
    prefill: Most slots of a prefill step: 128 by default.
    fixed: An engine for exactly --batch rows of --block slots.
    """

    target: str = "rtx"
    kv_layout: str | None = None
    tf32: bool = False
    workspace: MostBytes = None
    build: bool = True
    batch: Annotated[int, AtLeastOne] = 1
    capacity: Annotated[int | None, AtLeastOne] = None
    prefill: Annotated[int | None, AtLeastOne] = None
    fixed: bool = False
