"""What structured answers are asked for: a prompt of any ids, and two tools."""

from __future__ import annotations

PROMPT = [5, 17, 99]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["city"],
        },
    },
}  # fmt: skip
STOP = {"type": "function", "function": {"name": "stop"}}
