"""A good manifest, and that manifest with one thing wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mars_export.runtime.bundle.files import FileEntry
from mars_export.runtime.bundle.manifest import (
    Manifest,
    ModelInfo,
    ParityReport,
    Profile,
    TextInfo,
    TokenInfo,
    Variant,
)
from mars_export.runtime.bundle.variant_info import EngineInfo, Extent, ShapeRange
from support.fields import with_field

HASH = "0123456789abcdef" * 4
DECODE = ShapeRange("decode", Extent(1, 2, 4), Extent(1, 8, 15), Extent(1, 8, 8))
ENGINE = EngineInfo("1.7.1.116", "12", "linux-x86_64", ("sm86",), (DECODE,), "rtx.onnx", HASH, 3.5, 10**9)
GOOD = Manifest(
    producer="mars-export 0.1.0",
    source="here",
    revision=None,
    model=ModelInfo("llama", 288, 48, 2, 4, 2, 12, 512),
    block=8,
    tokens=TokenInfo(268, (267,), 265),
    text=TextInfo("tokenizer.json", "{{ messages }}", None, "<|im_end|>"),
    variants=(
        Variant(
            "model",
            "onnx",
            "model.onnx",
            "weights.bin",
            "float32",
            "float32",
            "in-place",
            ("token_ids", "confidence"),
            drift=ParityReport(9, 9, 0.1, 0.1),
        ),
        Variant(
            "fixed",
            "onnx",
            "fixed.onnx",
            "weights.bin",
            "float32",
            "float32",
            "in-place",
            ("token_ids", "confidence", "logits"),
            1,
            8,
            64,
        ),
    ),
    files=tuple(
        FileEntry(name, 3, HASH) for name in ("model.onnx", "fixed.onnx", "weights.bin", "tokenizer.json")
    ),
    profiles=(Profile("math", 0.9, "probability", "model", HASH, {"accuracy": [0.5, 0.6]}),),
)


def changed(path: str, value: Any, manifest: Manifest = GOOD) -> str:
    """The good manifest (or another) with one field set, as `with_field` does it."""
    return with_field(manifest.to_json(), path, value)


def rehash(bundle: Path) -> None:
    """Sizes, hashes and the checksum as the files are now: an author of a bundle can always do that."""
    value = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    for entry in value["files"]:
        data = (bundle / entry["path"]).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(value)
    (bundle / "manifest.json").write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    (bundle / "manifest.sha256").write_text(f"{digest}  manifest.json\n", encoding="ascii")
