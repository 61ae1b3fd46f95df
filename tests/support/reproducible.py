"""Bundles of a tiny model whose KV entries do not depend on the size of a step: heads of 32."""

from __future__ import annotations

from pathlib import Path

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from support import tiny

WIDE = tiny.Tiny("wide", "llama", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32})


def export_reproducible(kind: str, root: Path) -> Path:
    """`kind`: a precision, `own` behind it where each head has keys and values of its own, and `kv8` for int8
    entries.
    """
    precision, *more = kind.split(" ")
    of = tiny.Tiny("own", "llama", {**WIDE.settings, "num_key_value_heads": 4}) if "own" in more else WIDE
    checkpoint = tiny.write(of, root / f"checkpoint of {kind}")
    export_onnx(
        open_checkpoint(str(checkpoint)),
        root / kind,
        ExportOptions(block=6, precision=precision, metrics=True, kv="int8" if "kv8" in more else "float"),
    )
    return root / kind
