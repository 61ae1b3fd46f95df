"""Checkpoints to spoil: a copy of a tiny one, and an adapter of any fields and tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.tiny import Named


@pytest.fixture
def copied(checkpoints: Named, tmp_path: Path) -> Named:
    return lambda name: shutil.copytree(checkpoints(name), tmp_path / name)


@pytest.fixture
def adapted(checkpoints: Named, tmp_path: Path) -> Callable[..., Path]:
    """An adapter directory over the tiny Llama: fields of its config, and its tensors."""

    def make(tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
        directory = tmp_path / "adapter"
        directory.mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "base_model_name_or_path": str(checkpoints("llama")), "r": 4}
        (directory / "adapter_config.json").write_text(json.dumps(config | fields))
        part = "base_model.model.model.layers.0.self_attn.q_proj"
        usual = {f"{part}.lora_A.weight": np.ones((4, 48)), f"{part}.lora_B.weight": np.ones((48, 4))}
        arrays = usual if tensors is None else tensors
        save_file(
            {k: v.astype(np.float32) for k, v in arrays.items()}, directory / "adapter_model.safetensors"
        )
        return directory

    return make
