"""The form that a task row requires of its answer, as fields of a GenerationConfig: a schema, a regex,
choices or tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.decode.config import GenerationConfig
from ...runtime.errors import CalibrationError, MarsError

FIELDS = ("schema", "regex", "choice", "tools")


def read_form(row: Mapping[str, Any]) -> dict[str, Any]:
    """The form in a row's fields. Raises CalibrationError for invalid values."""
    values = {name: row[name] for name in FIELDS if row.get(name) is not None}
    if isinstance(values.get("choice"), list):
        values["choice"] = tuple(values["choice"])
    try:
        config = GenerationConfig(**values)
    except MarsError as error:
        raise CalibrationError(str(error)) from error
    return {name: getattr(config, name) for name in values}


def read_schema(path: Path) -> dict[str, Any]:
    """The schema in a file of JSON. Raises CalibrationError for anything else."""
    try:
        return read_form({"schema": json.loads(path.read_text(encoding="utf-8"))})
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}; give a JSON schema") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: not a JSON schema: {error}") from error
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from error
