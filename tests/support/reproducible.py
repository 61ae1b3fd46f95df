"""Bundles of a tiny model whose KV entries do not depend on the size of a step: heads of 32."""

from __future__ import annotations

from pathlib import Path

from support import tiny
from support.families import HYBRIDS
from support.fixtures import Exported


def reproducible(exported: Exported, kind: str) -> Path:
    """`kind`: a precision, `own` behind it where each head has keys and values of its own, `states` for
    recurrent layers, and `kv8` for int8 entries.
    """
    precision, *more = kind.split(" ")
    of, kv = tiny.OWN if "own" in more else tiny.WIDE, "int8" if "kv8" in more else "float"
    of = HYBRIDS["hybrid"] if "states" in more else of
    return exported(of, precision=precision, metrics=True, kv=kv, allow_drift="states" in more)
