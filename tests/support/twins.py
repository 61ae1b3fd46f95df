"""What the Python runtime and libmars are both asked."""

from __future__ import annotations

from typing import Any

PROMPT = [5, 9, 200, 17]
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "seed": 2**63 + 1},
    {"repetition_penalty": 1.4},
)
