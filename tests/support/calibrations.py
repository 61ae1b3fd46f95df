"""A short calibration: its rows, its options, and a race whose end is known."""

from __future__ import annotations

import json
from typing import Any

from mars_export.calibration.tau.options import CalibrationOptions

WORDS = (
    "hello",
    "the cat",
    "one",
    "in the end",
    "an apple",
    "er",
    "on",
    "a hat",
    "thin air",
    "then",
    "he",
    "ten",
    "tan",
    "none",
    "a",
    "the",
)
OPTIONS = CalibrationOptions(max_drop=0.4, taus=(0.999, 0.9, 0.5, 0.0), batch=4)


def rows(**fields: Any) -> str:
    """Any answer is right, unless `fields` say otherwise."""
    common = {"answer": "", "score": "contains", "max_new_tokens": 12} | fields
    return "".join(
        json.dumps({"messages": [{"role": "user", "content": word}], **common}) + "\n" for word in WORDS
    )


def by_order(*arguments: Any) -> dict[str, list[float]]:
    """Speeds as if each setting were twice as fast as the safer one before it."""
    return {name: [2.0**i] * 3 for i, name in enumerate(arguments[3])}
