"""Weights made to hurt: tables of another shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.hostile import refused
from support.tiny import Named

from mars_export.exporter.checkpoint.names import EMBEDDING


@pytest.mark.parametrize("shape", [(), (0,), (288,), (0, 48), (288, 48, 1), (1, 48)], ids=str)
def test_tables_of_another_shape(shape: tuple[int, ...], copied: Named, adapted: Callable[..., Path]) -> None:
    table = np.ones(shape, np.float32)
    names = ("lm_head.weight", EMBEDDING)
    refused(
        adapted({f"base_model.model.{name}": table for name in names}, modules_to_save=["lm_head"]),
        "adapter|config.json",
    )
    directory = copied("llama")
    save_file(dict.fromkeys(names, table), directory / "model.safetensors")
    refused(directory, "do not fit config.json")
