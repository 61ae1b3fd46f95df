"""A JSON document with one field set, for tests of readers: what a damaged or odd file looks like."""

from __future__ import annotations

import json
from typing import Any


def with_field(document: str, path: str, value: Any) -> str:
    """`document` with one field set; `...` removes it. `path` is dotted, list positions are numbers."""
    whole = json.loads(document)
    *parents, last = [int(p) if p.isdecimal() else p for p in path.split(".")]
    target = whole
    for parent in parents:
        target = target[parent]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(whole)
