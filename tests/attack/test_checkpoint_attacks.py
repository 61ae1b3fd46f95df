"""Checkpoints made to hurt: a CheckpointError or an ExportError soon, in little memory, and nothing else.

`MARS_ATTACKS` is the number of mutated checkpoints of each kind; a few seconds' worth by default.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import tiny
from support.tiny import Named

from mars_export.exporter.checkpoint.gguf import convert
from mars_export.exporter.checkpoint.names import EMBEDDING
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.patterns import Patterns
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.errors import CheckpointError, ExportError

ATTACKS = int(os.environ.get("MARS_ATTACKS", "150"))
SECONDS, BYTES = 5, 300_000_000  # of processor time: the machine may be busy


@contextmanager
def bounded() -> Iterator[None]:
    """What is inside ends soon and allocates little (numpy and Python objects are counted)."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture
def copied(checkpoints: Named, tmp_path: Path) -> Named:
    return lambda name: shutil.copytree(checkpoints(name), tmp_path / name)


def refused(location: Path, message: str, **arguments: Any) -> None:
    with bounded(), pytest.raises(CheckpointError, match=message) as told:
        open_checkpoint(str(location), **arguments)
    assert len(str(told.value)) < 20_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2_000_000_000),
        ("num_hidden_layers", 20_000_000),
        ("num_hidden_layers", 4097),
        ("head_dim", 10**10),
        ("vocab_size", 10**12),
        ("hidden_size", 10**4000),
        ("intermediate_size", 2**40),
        ("num_attention_heads", 2**31),
        ("max_position_embeddings", 2**40),
    ],
)
def test_numbers_that_no_model_has(field: str, value: int, copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, **{field: value})
    refused(directory, f"`{field}` is .*, beyond the")


FLAT = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 10**400},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 10**400}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}},
        {"rope_parameters": FLAT},
        {"rope_parameters": {"rope_type": "x" * 10_000_000}},
        {"rope_parameters": {"sliding": {"rope_type": "default"}}},
        {"model_type": "x" * 10_000_000},
        {"hidden_act": ["silu"] * 1_000_000},
        {"quantization_config": {"quant_method": "x" * 10_000_000}},
    ],
    ids=range(10),
)  # fmt: skip
def test_config_values_that_break_arithmetic_or_messages(changes: dict[str, Any], copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, **changes)
    refused(directory, "config.json")


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


# --- adapters ---


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


EVIL = (
    "(([a-z0-9._]+)+)+#",
    "(a|a)*b",
    "(.*)(.*)(.*)(.*)(.*)x",
    ".*.*.*.*.*.*x",
    "(?i)q_proj",
    "(?=a)",
    r"(q)\1",
    "q{1,9999}",
    "((q))",
    "(l|l)(a|a)(y|y)(e|e)(r|r)(s|s)(l|l)(a|a)(y|y)(e|e)",
    "(" * 50_000,
    "x" * 100_000,
    "[z-a]",
    "",
)


@pytest.mark.parametrize("pattern", EVIL, ids=range(len(EVIL)))
def test_patterns_that_take_for_ever(pattern: str, adapted: Callable[..., Path]) -> None:
    refused(adapted(alpha_pattern={pattern: 8}), "pattern.*merge_and_unload")
    refused(adapted(trainable_token_indices={pattern: [1]}), "pattern.*merge_and_unload")


def test_more_expressions_than_anyone_writes(adapted: Callable[..., Path]) -> None:
    refused(
        adapted(alpha_pattern={f"a{i}.*": 1 for i in range(1000)}),
        "1000 regular expressions are more than 16",
    )


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj"),
        ("layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        (r".*layers\.(0|1|17)\..*q_proj", "model.layers.17.self_attn.q_proj"),
        (r"^model\.layers\.\d+\.mlp.up_proj$", "model.layers.5.mlp.up_proj"),
        ("[qkv]_proj", "model.layers.0.self_attn.k_proj"),
    ],
)
def test_patterns_that_people_write(pattern: str, module: str) -> None:
    import re

    assert re.match(rf"(.*\.)?({pattern})$", module), "as peft matches them"
    assert Patterns({pattern: 7}).find(module, 1) == 7
    assert Patterns({pattern: 7}).find("model.layers.0.mlp.gate_proj", 1) == 1


def test_the_worst_pattern_that_is_let_through_is_quick() -> None:
    worst = Patterns({"(" + "|".join("a" * 16) + ").*.*z": 1})
    with bounded():
        for i in range(100):
            assert worst.find(f"model.layers.{i}." + "a" * 60, 0) == 0


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"self_attn.q_proj.lora_A": (0, 48), "self_attn.q_proj.lora_B": (48, 0)}, "does not fit"),
        ({"self_attn.q_proj.lora_A": (), "self_attn.q_proj.lora_B": (48, 4)}, "does not fit"),
        ({"input_layernorm.lora_A": (4, 48), "input_layernorm.lora_B": (48, 4)}, "does not fit"),
        ({"self_attn.q_proj.lora_A": (4, 48)}, "no place in the base model"),
    ],
)
def test_low_rank_pairs_that_are_none(
    tensors: dict[str, tuple[int, ...]], message: str, adapted: Callable[..., Path]
) -> None:
    named = {
        f"base_model.model.model.layers.0.{k}.weight": np.ones(s, np.float32) for k, s in tensors.items()
    }
    refused(adapted(named), message)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 10**400},
        {"lora_alpha": True},
        {"lora_alpha": "nan"},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"alpha_pattern": {"q_proj": [1]}},
        {"r": True},
        {"revision": 5},
        {"modules_to_save": {"lm_head": 1}},
        {"modules_to_save": [5]},
        {"init_lora_weights": {"a": 1}},
        {"init_lora_weights": 1},
        {"peft_type": ["LORA"]},
        {"bias": [1]},
        {"trainable_token_indices": {"embed_tokens": [10**30]}},
    ],
    ids=str,
)
def test_adapter_fields_of_other_types(fields: dict[str, Any], adapted: Callable[..., Path]) -> None:
    directory = adapted(**fields)
    if "trainable_token_indices" in fields:
        name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        save_file({name: np.ones((1, 48), np.float32)}, directory / "adapter_model.safetensors")
    refused(directory, "adapter")


# --- tokenizers ---


@pytest.mark.parametrize("name", ["mask_token", "eos_token", "pad_token", "bos_token"])
@pytest.mark.parametrize("value", [5, True, ["x"], {"content": 7}, 1.5], ids=str)
def test_special_tokens_that_are_no_texts(name: str, value: object, copied: Named) -> None:
    directory = copied("llama")
    tiny.change_config(directory, "tokenizer_config.json", **{name: value})
    refused(directory, f"tokenizer_config.json: `{name}` must be a text")


@pytest.mark.parametrize("mask", ["99999999999", "9" * 5000, "-1", "١٢", "x" * 10_000_000])
def test_mask_ids_beyond_everything(mask: str, copied: Named) -> None:
    refused(copied("llama"), "mask", mask_token=mask)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"model": {"type": "BPE"}}'])
def test_tokenizers_that_are_none(content: bytes, copied: Named) -> None:
    directory = copied("llama")
    (directory / "tokenizer.json").write_bytes(content)
    refused(directory, "tokenizer.json")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(content)
    refused(directory, "tokenizer")


def test_an_exit_of_zero_means_a_bundle_that_opens(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from mars_export.exporter import export

    opened = open_checkpoint(str(checkpoints("llama")))
    exact = export._model_info
    monkeypatch.setattr(export, "_model_info", lambda checkpoint: replace(exact(checkpoint), num_heads=2**20))
    with pytest.raises(ExportError, match="the bundle that was written does not open: (?s:.)*num_heads"):
        export_onnx(opened, tmp_path / "bundle", ExportOptions(block=4))
    assert not list(tmp_path.iterdir())


# --- GGUF ---


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def gguf_file(
    path: Path, *fields: bytes, tensors: bytes = b"", num_tensors: int = 0, num_fields: int = -1
) -> Path:
    count = len(fields) if num_fields < 0 else num_fields
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(fields) + tensors)
    return path


HUGE = 2**63
GGUFS: dict[str, tuple[tuple[bytes, ...], dict[str, Any]]] = {
    "array of arrays": ((field("a", 9, struct.pack("<IQ", 9, HUGE)),), {}),
    "deep arrays": ((field("a", 9, struct.pack("<IQ", 9, 1) * 100_000),), {}),
    "long array": ((field("a", 9, struct.pack("<IQ", 0, HUGE)),), {}),
    "long array of texts": ((field("a", 9, struct.pack("<IQ", 8, HUGE)),), {}),
    "long text": ((field("a", 8, struct.pack("<Q", HUGE)),), {}),
    "unknown type": ((field("a", 77, b"1234"),), {}),
    "many fields": ((), {"num_fields": HUGE}),
    "many tensors": ((), {"num_tensors": HUGE}),
    "tensor of rank 2**31": ((), {"num_tensors": 1, "tensors": struct.pack("<QcI", 1, b"a", 2**31)}),
    "tensor of 2**120 numbers": (
        (), {"num_tensors": 1, "tensors": struct.pack("<QcIQQIQ", 1, b"a", 2, 2**60, 2**60, 0, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUFS)
def test_gguf_headers_that_never_end(case: str, tmp_path: Path) -> None:
    fields, settings = GGUFS[case]
    path = gguf_file(tmp_path / "model.gguf", *fields, **settings)
    with bounded(), pytest.raises(CheckpointError, match="not a readable GGUF file"):
        convert(path, tmp_path / "model")


def written(path: Path, change: Callable[[gguf.GGUFWriter], None]) -> Path:
    """A small GGUF file whose fields are right but for what `change` adds or replaces."""
    writer = gguf.GGUFWriter(str(path), "llama")
    usual: dict[str, Any] = {
        "embedding_length": 48, "block_count": 1, "feed_forward_length": 80, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    for name, value in usual.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = tiny.tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tiny.SPECIALS else 1 for token in tokens])
    writer.add_token_merges(list(tiny.MERGES))
    writer.add_eos_token_id(tiny.IM_END)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(
    name: str, value: Any, kind: gguf.GGUFValueType, item: Any = None
) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][name] = gguf.GGUFValue(value=value, type=kind, sub_type=item)

    return change


T = gguf.GGUFValueType


@pytest.mark.parametrize(
    "change",
    [
        put("llama.attention.head_count", 0, T.UINT32),
        put("llama.attention.head_count", "four", T.STRING),
        put("llama.attention.head_count", [4, 4], T.ARRAY, T.INT32),
        put("llama.attention.head_count", True, T.BOOL),
        put("llama.embedding_length", 2**40, T.UINT64),
        lambda writer: (
            put("llama.attention.key_length", 14, T.UINT32)(writer),
            writer.add_tensor("blk.0.attn_q.weight", np.ones((48, 48), np.float32)),
        ),
        put("llama.rope.freq_base", "big", T.STRING),
        put("llama.attention.layer_norm_rms_epsilon", "small", T.STRING),
        put("general.architecture", 5, T.UINT32),
        put("tokenizer.ggml.tokens", [1, 2, 3], T.ARRAY, T.INT32),
        put("tokenizer.ggml.tokens", 5, T.UINT32),
        put("tokenizer.ggml.token_type", ["a", "b"], T.ARRAY, T.STRING),
        put("tokenizer.ggml.token_type", [1, 1], T.ARRAY, T.INT32),
        put("tokenizer.ggml.merges", ["no pair"], T.ARRAY, T.STRING),
        put("tokenizer.ggml.merges", 7, T.UINT32),
        put("tokenizer.ggml.eos_token_id", 10**6, T.UINT32),
        put("tokenizer.ggml.model", 7, T.UINT32),
    ],
    ids=range(17),
)
def test_gguf_fields_of_other_types(change: Callable[[gguf.GGUFWriter], None], tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", change)
    with bounded(), pytest.raises(CheckpointError, match=r"model.gguf: "):
        convert(path, tmp_path / "model")


# --- at random ---

SCALARS = (None, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, "", "x", "é\ud800", True, [], {}, [[]], {"a": {}})


def mutated(value: Any, draw: random.Random) -> Any:
    """JSON with one to three places changed."""
    for _ in range(draw.randint(1, 3)):
        at, place, path = value, None, None
        while isinstance(at, dict | list) and at and (place is None or draw.random() < 0.7):
            place, path = at, draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = at[path]
        if place is not None:
            place[path] = copy.deepcopy(draw.choice(SCALARS))
    return value


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
def test_json_of_a_checkpoint_at_random(name: str, copied: Named) -> None:
    directory, draw = copied("qwen3-mixed"), random.Random(name)
    source = directory / name
    original = source.read_text() if source.is_file() else '{"eos_token_id": [266]}'
    for _ in range(ATTACKS):
        source.write_text(json.dumps(mutated(json.loads(original), draw)), encoding="utf-8")
        with bounded():
            attempt(directory)


def test_weights_of_a_checkpoint_at_random(copied: Named) -> None:
    directory, draw = copied("llama"), random.Random(1)
    source = directory / "model.safetensors"
    original = source.read_bytes()
    length = int.from_bytes(original[:8], "little")
    for _ in range(ATTACKS):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(8 + length)] = draw.randrange(256)
        source.write_bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])
        with bounded():
            attempt(directory)


def test_gguf_files_at_random(tmp_path: Path) -> None:
    source, draw = written(tmp_path / "model.gguf", lambda writer: None), random.Random(2)
    original = source.read_bytes()
    for _ in range(ATTACKS):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.choice((0, 8, 9, 255, draw.randrange(256)))
        source.write_bytes(data)
        with bounded(), suppress(CheckpointError):
            convert(source, tmp_path / "model")


def test_adapters_at_random(adapted: Callable[..., Path]) -> None:
    directory = adapted(alpha_pattern={"q_proj": 3}, trainable_token_indices=[1], modules_to_save=["norm"])
    source, draw = directory / "adapter_config.json", random.Random(3)
    original = source.read_text()
    for _ in range(ATTACKS):
        source.write_text(json.dumps(mutated(json.loads(original), draw)), encoding="utf-8")
        with bounded():
            attempt(directory)


def test_tensors_of_an_adapter_at_random(adapted: Callable[..., Path]) -> None:
    part = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{part}.lora_A.weight": np.ones((4, 48)), f"{part}.lora_B.weight": np.ones((48, 4))}
    tensors |= {f"base_model.model.{name}": np.ones((288, 48)) for name in ("lm_head.weight", EMBEDDING)}
    directory, draw = adapted(tensors, modules_to_save=["lm_head"]), random.Random(5)
    source = directory / "adapter_model.safetensors"
    original = source.read_bytes()
    length = int.from_bytes(original[:8], "little")
    entries = json.loads(original[8 : 8 + length])
    for _ in range(ATTACKS):
        text = json.dumps(mutated(copy.deepcopy(entries), draw)).encode("utf-8")
        source.write_bytes(len(text).to_bytes(8, "little") + text + original[8 + length :])
        with bounded():
            attempt(directory)


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


def attempt(directory: Path) -> None:
    problem = None
    try:
        open_checkpoint(str(directory))
    except CheckpointError as error:
        problem = error
    assert len(str(problem)) < 50_000


def test_what_opens_also_exports_or_says_why(copied: Named, tmp_path: Path) -> None:
    """Mutated configs whose shapes still fit: the bundle opens, or there is none."""
    directory, draw = copied("llama"), random.Random(4)
    original = json.loads((directory / "config.json").read_text())
    fields = ("rms_norm_eps", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id")
    for i in range(max(10, ATTACKS // 10)):
        changes = {draw.choice(fields): draw.choice(SCALARS) for _ in range(2)}
        (directory / "config.json").write_text(json.dumps(original | changes))
        target = tmp_path / f"bundle-{i}"
        try:
            export_onnx(open_checkpoint(str(directory)), target, ExportOptions(block=2, oracle=False))
        except (CheckpointError, ExportError):
            assert not target.exists()
        else:
            open_bundle(target)
