"""Bundles of a tiny model whose KV entries do not depend on the size of a step: heads of 32."""

from __future__ import annotations

from pathlib import Path

from support import tiny
from support.exports import export

WIDE = tiny.Tiny("wide", "llama", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32})


def export_reproducible(kind: str, root: Path) -> Path:
    """`kind`: a precision, `own` behind it where each head has keys and values of its own, and `kv8` for int8
    entries.
    """
    precision, *more = kind.split(" ")
    of = tiny.Tiny("own", "llama", {**WIDE.settings, "num_key_value_heads": 4}) if "own" in more else WIDE
    checkpoint = tiny.write(of, root / f"checkpoint of {kind}")
    kv = "int8" if "kv8" in more else "float"
    export(checkpoint, root / kind, block=6, precision=precision, metrics=True, kv=kv)
    return root / kind
