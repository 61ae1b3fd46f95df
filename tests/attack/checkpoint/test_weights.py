"""Weights made to hurt: headers of safetensors that never end, and tables of another shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.hostile import refused
from support.tiny import Named

from mars_export.exporter.checkpoint.architecture.names import EMBEDDING


def header(directory: Path, entries: dict[str, Any], data: int = 64) -> Path:
    text = json.dumps(entries).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return directory


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [9] * 300_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [9] * 1_000_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [int("9" * 4000)] * 2, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, int("9" * 4000)]},
        {"dtype": "x" * 5_000_000, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    ],
    ids=["rank", "much rank", "size", "offset", "dtype", "bool"],
)
def test_headers_that_take_long_to_multiply(entry: dict[str, Any], copied: Named) -> None:
    refused(header(copied("llama"), {"model.norm.weight": entry}), "`model.norm.weight`")


def test_a_tensor_whose_name_is_a_novel(copied: Named) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    refused(header(copied("llama"), {"x" * 5_000_000: entry}), "name has 5000000 characters")


def test_a_header_larger_than_any(copied: Named) -> None:
    directory = copied("llama")
    with (directory / "model.safetensors").open("wb") as file:
        file.write((98_000_000).to_bytes(8, "little"))
        file.truncate(100_000_000)
    refused(directory, "header says 98000000 bytes")


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
