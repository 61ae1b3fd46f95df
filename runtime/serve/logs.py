"""Lines of the log, for people or as JSON: numbers, names and reasons, never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

LEVELS = ("debug", "info", "warning", "error", "critical")


class Lines(logging.Formatter):
    """One line for each record. What a record has as `fields` are fields here, too."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields = getattr(record, "fields", {})
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self._as_json:
            line = {
                "time": when,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": message,
            }
            return json.dumps(line | fields, ensure_ascii=True, default=str)
        named = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
        whole = f"{when} {record.levelname.lower():7} {message} {named}".rstrip()
        return whole.replace("\r", "\\r") if record.exc_info else whole.encode("unicode_escape").decode()


def _shown(value: object) -> str:
    text = str(value)
    return text if text and " " not in text else repr(text)


def listen(level: str, *, as_json: bool) -> None:
    """Write what this package and the HTTP server say to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json=as_json))
    # A batcher tells of each request, too, and the HTTP server of bytes that are none, as anybody can send.
    least = {"mars_export.serve": "debug", "mars_export": "warning", "uvicorn": "error", "asyncio": "error"}
    for name, own in least.items():
        logger = logging.getLogger(name)
        logger.setLevel((level if level == "debug" else max(own, level, key=LEVELS.index)).upper())
        if name != "mars_export.serve":  # which hands on what it is told
            logger.addHandler(handler)
            logger.propagate = False
