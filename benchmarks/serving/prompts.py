"""The prompts of clients: held-out test rows of the default checkpoint's data, as chats."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mars_export.calibration.tasks.tasks import load

DATA = Path(__file__).resolve().parents[2] / "examples" / "default-checkpoint" / "data"
TASKS = ("assistant", "arithmetic", "chat")


def chats(tasks: list[str], count: int, most_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` requests of these tasks in turns, rows drawn without repetition as far as they go."""
    draw = random.Random(seed)
    rows = {task: list(load(DATA / f"{task}.test.jsonl")) for task in tasks}
    for found in rows.values():
        draw.shuffle(found)
    asked = []
    for i in range(count):
        found = rows[tasks[i % len(tasks)]]
        row = found[i // len(tasks) % len(found)]
        asked.append({"messages": row.source, "max_tokens": min(most_tokens, row.max_new_tokens)})
    return asked
