"""A small benchmark: its words, their task and options, and the command."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from mars_export.calibration.bench.settings import BenchOptions
from mars_export.cli import app

WORDS = ("hello", "the cat", "one", "in the end", "an apple", "er")
OPTIONS = BenchOptions(taus=(0.5,), batches=(1, 2), rounds=2)


def rows(**fields: Any) -> str:
    """Any answer is right, unless `fields` say otherwise."""
    common = {"answer": "", "score": "contains", "max_new_tokens": 6} | fields
    return "".join(
        json.dumps({"messages": [{"role": "user", "content": word}], **common}) + "\n" for word in WORDS
    )


def shell(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)])
