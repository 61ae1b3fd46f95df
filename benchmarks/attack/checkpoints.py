"""Exports hostile checkpoints: every form, damaged in some way.

The export may succeed, but then the bundle must open, and there may be no other files in any case.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attack import goods
from attack.mutators import NASTY, PIECES, change, damaged, misplaced
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.bundle.open import open_bundle

Mutator = Callable[[Path, random.Random], None]
NUMBERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window",
    "eos_token_id", "bos_token_id", "pad_token_id", "mask_token_id", "initializer_range", "attention_dropout",
)  # fmt: skip
VALUES = (*(0, -1, 1, 2, 3, 7, 32, 64, 288, 2**20, 2**31, 2**63, 10**400), *(0.5, 1e-300, 1e308, 1e-5, 1e9))
ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "x")
ROPE_FIELDS = (
    "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor",
)  # fmt: skip
PATTERNS = (
    *("(([a-z0-9._]+)+)+#", "(a|a)*b", "(.*)(.*)(.*)(.*)x", ".*.*.*.*.*x", "(?i)q_proj", r"(q)\1"),
    *("q{1,9999}", "(" * 5000, "x" * 50_000, "[z-a]", "", "q_proj", r"layers\.0\..*", ".*"),
)
NUMBERS_OF_WEIGHTS = (float("nan"), float("inf"), -float("inf"), 1e38, -1e30, 1e-45, 0.0, 65504.0)


def json_field(target: Path, draw: random.Random) -> None:
    """One to three places of any of the JSON files."""
    path = _some(target, draw, "**/*.json")
    value = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(draw.randint(1, 3)):
        change(value, draw)
    path.write_text(json.dumps(value), encoding="utf-8")


def numbers(target: Path, draw: random.Random) -> None:
    """Numbers of config.json that are not those of the weights."""
    fields = {draw.choice(NUMBERS): draw.choice(VALUES) for _ in range(draw.randint(1, 3))}
    goods.change(_some(target, draw, "**/config.json"), **fields)


def rope(target: Path, draw: random.Random) -> None:
    def value() -> Any:
        return draw.choice((draw.choice(VALUES), [draw.choice(VALUES)] * draw.randint(0, 9), None))

    scaling = {field: value() for field in draw.sample(ROPE_FIELDS, draw.randint(0, 6))}
    scaling["rope_type" if draw.random() < 0.8 else "type"] = draw.choice(ROPES)
    name = draw.choice(("rope_scaling", "rope_parameters"))
    goods.change(_some(target, draw, "**/config.json"), **{name: scaling})


def quantization(target: Path, draw: random.Random) -> None:
    """What config.json says about codes, and the file that old AutoGPTQ wrote."""
    path = _some(target, draw, "**/config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    said = config.get("quantization_config") or {"quant_method": "gptq", "bits": 4, "group_size": 32}
    for _ in range(draw.randint(1, 2)):
        change(said, draw)
    method = draw.choice(("gptq", "awq", "compressed-tensors", "bitsandbytes", "fp8", None))
    if draw.random() < 0.3 and isinstance(said, dict):
        said["quant_method"] = method
    if draw.random() < 0.3:
        goods.change(path, quantization_config=None)
        path = path.with_name("quantize_config.json")
        path.write_text(json.dumps(said), encoding="utf-8")
    else:
        goods.change(path, quantization_config=said)


def file_bytes(target: Path, draw: random.Random) -> None:
    path = _some(target, draw, "**/*")
    data = path.read_bytes()
    path.write_bytes(damaged(data, draw))


def header(target: Path, draw: random.Random) -> None:
    """The header of a safetensors file: names, dtypes, shapes, offsets, its length."""
    path = _some(target, draw, "**/*.safetensors")
    entries, data = _split(path)
    for _ in range(draw.randint(1, 3)):
        change(entries, draw)
    text = json.dumps(entries).encode("utf-8", "surrogatepass")
    length = len(text)
    if draw.random() < 0.2:
        length = draw.choice((0, 1, length - 1, length + 1, 2**20, 2**40, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + text + data)


def offsets(target: Path, draw: random.Random) -> None:
    """Entries that overlap, lie outside, change places or say another shape of the same size."""
    path = _some(target, draw, "**/*.safetensors")
    entries, data = _split(path)
    names = [name for name in entries if name != "__metadata__"]
    one, other = entries[draw.choice(names)], entries[draw.choice(names)]
    match draw.randint(0, 5):
        case 0:
            one["data_offsets"] = other["data_offsets"]
        case 1:
            one["data_offsets"] = [
                offset + draw.choice((-4, -1, 1, 2, 4096, 2**40)) for offset in one["data_offsets"]
            ]
        case 2:
            one["shape"] = one["shape"][::-1]
        case 3:
            one["shape"] = [1] * draw.choice((1, 40, 400)) + one["shape"]
        case 4:
            one["dtype"] = draw.choice(
                ("F64", "F32", "F16", "BF16", "I8", "I32", "I64", "U8", "F8_E4M3", "BOOL")
            )
        case 5:
            one["shape"], other["shape"] = other["shape"], one["shape"]
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def weights(target: Path, draw: random.Random) -> None:
    """Numbers that no training leaves, in some or all places of a tensor."""
    path = _some(target, draw, "**/*.safetensors")
    entries, data = _split(path)
    kinds = {"F32": "f4", "F16": "f2", "BF16": "u2"}
    names = [
        name for name, entry in entries.items() if isinstance(entry, dict) and entry.get("dtype") in kinds
    ]
    content = bytearray(data)
    for name in draw.sample(names, min(len(names), draw.randint(1, 3))):
        start, end = entries[name]["data_offsets"]
        kind = entries[name]["dtype"]
        number = np.float32(draw.choice(NUMBERS_OF_WEIGHTS))
        array = np.frombuffer(content, kinds[kind], (end - start) // np.dtype(kinds[kind]).itemsize, start)
        with np.errstate(over="ignore"):
            bits = number.view(np.uint32) >> 16 if kind == "BF16" else number.astype(kinds[kind])
        some = slice(None) if draw.random() < 0.4 else slice(draw.randrange(len(array)), None, 97)
        array[some] = bits
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(content))


def adapter(target: Path, draw: random.Random) -> None:
    """What an adapter says about itself."""
    path = target / "adapter_config.json"
    pattern = {
        draw.choice(PATTERNS): draw.choice((*VALUES[:8], "x", None)) for _ in range(draw.randint(1, 3))
    }
    fields: dict[str, Any] = {
        "r": draw.choice(VALUES), "lora_alpha": draw.choice(VALUES), "alpha_pattern": pattern,
        "rank_pattern": pattern, "target_modules": draw.choice((list(pattern), *PATTERNS, "all-linear")),
        "layers_to_transform": [draw.choice(VALUES)], "modules_to_save": ["lm_head", draw.choice(PATTERNS)],
        "use_dora": True, "use_rslora": True, "fan_in_fan_out": True, "bias": draw.choice(("all", "x", 1)),
        "trainable_token_indices": draw.choice(([0], [2**40], {"x": [1]}, pattern)), "peft_type": "IA3",
        "base_model_name_or_path": draw.choice(("", "..", ".", str(target), "/dev/zero", "\x00", "x" * 5000)),
        "revision": draw.choice(NASTY), "layers_pattern": draw.choice(PATTERNS),
    }  # fmt: skip
    goods.change(path, **{name: fields[name] for name in draw.sample(sorted(fields), draw.randint(1, 3))})


def template(target: Path, draw: random.Random) -> None:
    text = "".join(draw.choices(PIECES, k=draw.randint(1, 12)))
    directory = _some(target, draw, "**/config.json").parent
    if draw.random() < 0.3:
        (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    else:
        goods.change(directory / "tokenizer_config.json", chat_template=text)


def index(target: Path, draw: random.Random) -> None:
    """Where the index says that tensors are."""
    path = target / "model.safetensors.index.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    names, files = list(value["weight_map"]), sorted(set(value["weight_map"].values()))
    places = (
        *files,
        "../x",
        "/dev/zero",
        "config.json",
        "model.safetensors",
        "",
        ".",
        "\ud800",
        "a/b",
        7,
        None,
    )
    for _ in range(draw.randint(1, 4)):
        name = (
            draw.choice(names) if draw.random() < 0.8 else draw.choice(("x", "", "lm_head.weight", "é" * 999))
        )
        value["weight_map"][name] = draw.choice(places)
    path.write_text(json.dumps(value), encoding="utf-8")


def side_files(target: Path, draw: random.Random) -> None:
    """Something else in the place of a file."""
    misplaced(_some(target, draw, "**/*"), draw)


def nested(target: Path, draw: random.Random) -> None:
    """JSON that is deep, long, or no text at all."""
    path = _some(target, draw, "**/*.json")
    contents = (
        b"[" * 100_000, b'{"a":' * 50_000, b"", b"\xff\xfe", b"null", b"[]", b"7", b'"x"',
        b"{" + b" " * (20 << 20), b'{"a": [' + b"[]," * (5 << 20) + b"[]]}",
        b'{"a": ' + b"9" * 5000 + b"}", b'{"model_type": NaN}', b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}",
    )  # fmt: skip
    path.write_bytes(draw.choice(contents))


# Which forms each can be done to.
EVERY = tuple(goods.FORMS)
MUTATORS: dict[Mutator, tuple[str, ...]] = {
    **dict.fromkeys((json_field, numbers, rope, header, offsets, weights, template, nested), EVERY),
    quantization: ("gptq", "awq", "compressed", "plain"),
    **dict.fromkeys((file_bytes, side_files), EVERY),
    adapter: ("adapter",),
    index: ("sharded",),
}


def prepare(_good: Path, place: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a name that looks like a repository's is not asked for
    goods.write_all(place)


def mutate(good: Path, target: Path, seed: int) -> str:
    draw = random.Random(seed)
    mutator = draw.choice(list(MUTATORS))
    form = draw.choice(MUTATORS[mutator])
    shutil.copytree(good / form, target)
    if form == "adapter":
        goods.change(target / "adapter_config.json", base_model_name_or_path=str(target / "base"))
    mutator(target, draw)
    return f"{form} {mutator.__name__}"


def attempt(target: Path, seed: int) -> None:
    draw = random.Random(seed)
    precision = draw.choice(("fp32", "fp32", "fp16", "int8", "int4", "w8a8"))
    options = ExportOptions(
        block=draw.choice((2, 4)),
        precision=precision,
        asymmetric=precision == "int4" and draw.random() < 0.3,
        kv_layout=draw.choice(("static", "delta")),
        top_k=draw.choice((0, 4)),
        oracle=False,
    )
    out = target.with_name("out")
    try:
        export_onnx(open_checkpoint(str(target)), out / "bundle", options)
    except BaseException:
        assert not out.exists() or not list(out.iterdir()), "something is left behind"
        raise
    assert [path.name for path in out.iterdir()] == ["bundle"], "something lies beside the bundle"
    open_bundle(out / "bundle", full=True)


def _some(target: Path, draw: random.Random, pattern: str) -> Path:
    """One of the files that match, drawn; they are in order, so that a seed is a checkpoint."""
    return draw.choice(sorted(path for path in target.glob(pattern) if path.is_file()))


def _split(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]
