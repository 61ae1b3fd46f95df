"""The form that a task row requires of its answer: a schema, a regex, choices or tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.decode.config import GenerationConfig
from ...runtime.errors import CalibrationError, MarsError

FIELDS = ("schema", "regex", "choice", "tools")


@dataclass(frozen=True, slots=True)
class Form:
    """At most one form, as in GenerationConfig: schema and tools are JSON text."""

    schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    tools: str | None = None

    def __bool__(self) -> bool:
        return bool(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a GenerationConfig that this form sets."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Form:
        """The form in a row's fields. Raises CalibrationError for invalid values."""
        values = {name: row[name] for name in FIELDS if row.get(name) is not None}
        if isinstance(values.get("choice"), list):
            values["choice"] = tuple(values["choice"])
        try:
            config = GenerationConfig(**values)
        except MarsError as error:
            raise CalibrationError(str(error)) from error
        return cls(**{name: getattr(config, name) for name in FIELDS})

    @classmethod
    def read(cls, path: Path) -> Form:
        """The schema in a file of JSON. Raises CalibrationError for anything else."""
        try:
            return cls.of({"schema": json.loads(path.read_text(encoding="utf-8"))})
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be read: {error.strerror}; give a JSON schema") from error
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{path}: not a JSON schema: {error}") from error
        except CalibrationError as error:
            raise CalibrationError(f"{path}: {error}") from error
