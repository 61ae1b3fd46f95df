"""One test for each way a checkpoint can be wrong, and what must be read from a right one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support import tiny
from support.exports import export
from support.fixtures import Named

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError, ExportError

Refused = Callable[..., None]


def refused(directory: Path, message: str, **arguments: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(directory), **arguments)


def change_weights(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_no_such_place(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "not a directory, a .gguf file or a hub id")
    with pytest.raises(CheckpointError, match=r"no such file"):
        open_checkpoint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("setting", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'compressed-tensors'"),
        ({"quant_method": "fp8"}, "'fp8'"),
        ([1], "None"),
        (None, "'gptq'"),
    ],
)
def test_a_quantized_one_is_refused_by_its_method(setting: object, method: str, copied: Named) -> None:
    directory = copied("llama")
    if setting is None:  # as older AutoGPTQ wrote it
        (directory / "quantize_config.json").write_text("{}")
    else:
        tiny.change_config(directory, quantization_config=setting)
    change_weights(directory, lambda tensors: tensors.update(qweight=np.ones((2, 2), np.int32)))
    refused(directory, f"config.json: `quant_method` {method}\\); export from the unquantized checkpoint")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights: there is no model.safetensors or model.safetensors.index.json"),
        ("tokenizer.json", "no tokenizer.json; save the tokenizer beside the weights"),
    ],
)
def test_a_missing_file(file: str, message: str, copied: Named) -> None:
    directory = copied("llama")
    (directory / file).unlink()
    refused(directory, message)


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '"llama"', "[" * 100_000], ids=["empty", "cut", "list", "string", "deep"]
)
def test_unreadable_config(text: str, copied: Named) -> None:
    directory = copied("llama")
    (directory / "config.json").write_text(text)
    refused(directory, "config.json: (not readable as JSON|a JSON object is expected)")


def test_pickle_only(copied: Named) -> None:
    directory = copied("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, r"only pickle weights \(pytorch_model.bin\).*safe_serialization=True")


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_truncated(share: float, copied: Named) -> None:
    path = copied("llama") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refused(path.parent, "truncated or not a safetensors file")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [17], "data_offsets": [0, 64]},
        {"dtype": "I8", "shape": [64], "data_offsets": [0, 64]},
    ],
)
def test_a_malformed_header_entry(entry: object, copied: Named) -> None:
    directory = copied("llama")
    header = json.dumps({"model.norm.weight": entry}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    refused(directory, "not a safetensors file|`model.norm.weight` has dtype I8")


def test_missing_shards_are_all_named(copied: Named) -> None:
    directory = copied("llama-bias")
    shards = sorted(directory.glob("model-*.safetensors"))
    for shard in shards[1:3]:
        shard.unlink()
    refused(
        directory,
        f"2 of {len(shards)} shards of model.safetensors.index.json are missing: {shards[1].name},"
        f" {shards[2].name}",
    )


INDEXES: list[tuple[object, str]] = [
    (None, "no `weight_map`"),
    ([], "no `weight_map`"),
    ({"model.norm.weight": 3}, "no `weight_map`"),
    ({"model.norm.weight": "../model.safetensors"}, "plain file names, not '../model.safetensors'"),
    ({"model.norm.weight": "/etc/passwd"}, "plain file names, not '/etc/passwd'"),
]


@pytest.mark.parametrize(("weight_map", "message"), INDEXES)
def test_an_index_that_is_wrong(weight_map: object, message: str, copied: Named) -> None:
    directory = copied("llama-bias")
    tiny.change_config(directory, "model.safetensors.index.json", weight_map=weight_map)
    refused(directory, message)


def test_an_index_that_promises_too_much(copied: Named) -> None:
    directory = copied("llama-bias")
    shard = next(directory.glob("model-*.safetensors")).name
    tiny.change_config(directory, "model.safetensors.index.json", weight_map={"model.extra.weight": shard})
    refused(directory, "the index names tensors that their shards lack: model.extra.weight")


def test_missing_extra_and_misshapen_tensors_are_listed_at_once(copied: Named) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(47, np.float32)

    directory = copied("llama")
    change_weights(directory, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(directory))
    assert str(caught.value).startswith("3 tensors do not fit config.json")
    for line in (
        "missing: model.layers.0.mlp.up_proj.weight [80, 48]",
        "not part of a llama model: model.layers.7.mlp.up_proj.weight",
        "misshapen: model.norm.weight is [47], config.json implies [48]",
    ):
        assert line in str(caught.value)


def test_harmless_extras_are_no_reason_to_refuse(copied: Named) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(6, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    directory = copied("llama")
    change_weights(directory, change)
    open_checkpoint(str(directory))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_numbers(value: float, copied: Named, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value

    directory = copied("llama")
    change_weights(directory, change)
    with pytest.raises(CheckpointError, match=r"`model.layers.1.mlp.down_proj.weight` holds NaN or Inf"):
        export(directory, tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama"]


def test_weights_beyond_fp16(copied: Named, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = -80000

    directory = copied("llama")
    change_weights(directory, change)
    message = r"0.mlp.up_proj.weight` has numbers beyond float16's range of 65504; export with --prec"
    with pytest.raises(ExportError, match=message):
        export(directory, tmp_path / "bundle", precision="fp16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_read_exactly(dtype: torch.dtype, copied: Named) -> None:
    directory = copied("llama")
    model = tiny.build(tiny.TINIES["llama"]).to(dtype)
    tiny.save(model, directory)
    tensors = open_checkpoint(str(directory)).tensors
    for name, tensor in model.state_dict().items():
        if name in tensors.shapes:
            assert (np.asarray(tensors.read(name)).astype(np.float64) == tensor.double().numpy()).all(), name
